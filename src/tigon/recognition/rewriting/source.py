"""Read the source of a loaded function, and build a function from changed source in its place.

The file may have changed since it was imported, so it is compiled again, and used only if the resulting code object
equals the loaded one. transformers wraps the forward of decoder layers (`functools.wraps`): the innermost function is
read and replaced, and a copy of each wrapper is built around the new function.
"""

import ast
import contextlib
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar, cast

from tigon.runtime.weak_cache import cached_weakly

Cached = TypeVar("Cached", bound=Callable)
# Python 3.12 and later need this field of classes and functions. Older versions ignore it.
NO_TYPE_PARAMETERS: dict[str, Any] = {"type_params": []}


class NotReadable(Exception):
    """The source of a function cannot be used. The message is a clause that follows "its forward"."""


def _chain(function: FunctionType) -> list[FunctionType]:
    """Return a function, the function that it wraps, and so on to the innermost."""
    chain = [function]
    while isinstance(inner := getattr(chain[-1], "__wrapped__", None), FunctionType) and inner not in chain:
        chain.append(inner)
    return chain


def innermost(function: FunctionType) -> FunctionType:
    """Return the function behind all wrappers of `functools.wraps`."""
    return _chain(function)[-1]


CodeState = tuple[tuple[FunctionType, CodeType, tuple | None, dict | None], ...]


def code_state(function: FunctionType) -> CodeState:
    """Return the code and the defaults of a function and of the functions that it wraps."""
    return tuple((each, each.__code__, each.__defaults__, each.__kwdefaults__) for each in _chain(function))


def is_unchanged(state: CodeState) -> bool:
    """Return True if the functions still have the code and the defaults that `code_state` returned."""
    for function, code, defaults, keyword_defaults in state:
        if (
            function.__code__ is not code
            or function.__defaults__ is not defaults
            or function.__kwdefaults__ is not keyword_defaults
        ):
            return False
    return True


def cached_by_code(compute: Cached) -> Cached:
    """Cache the results of a function of a function, as `cached_weakly` does, as long as that function has its code."""
    results: Any = cached_weakly(lambda function, codes, *arguments: compute(function, *arguments))

    @functools.wraps(compute)
    def look_up(function: FunctionType, *arguments: Any) -> Any:
        return results(function, tuple(each.__code__ for each in _chain(function)), *arguments)

    vars(look_up)["cache_clear"] = results.cache_clear
    return cast(Cached, look_up)


def _copy_with(function: FunctionType, code: CodeType, scope: dict, closure: tuple[CellType, ...]) -> FunctionType:
    """Return a copy of a function with other code, globals and closure."""
    result = FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__, result.__module__ = function.__kwdefaults__, function.__module__
    result.__qualname__ = function.__qualname__
    result.__dict__.update(function.__dict__)
    return result


def rebuild_wrappers(function: FunctionType, inner: FunctionType) -> FunctionType:
    """Return copies of the wrappers of `function` around `inner`, which takes the place of the innermost function. It
    raises `NotReadable` for a wrapper without the wrapped function in its closure."""
    result = inner
    for wrapped, wrapper in _pairs(function):
        cells = wrapper.__closure__ or ()
        if not any(_contents(cell) is wrapped for cell in cells):
            raise NotReadable(
                f"is behind a wrapper ({wrapper.__module__}) whose closure does not hold the function that it wraps"
            )
        closure = tuple(CellType(result) if _contents(cell) is wrapped else cell for cell in cells)
        result = _copy_with(wrapper, wrapper.__code__, wrapper.__globals__, closure)
        vars(result)["__wrapped__"] = inner
    return result


def _pairs(function: FunctionType) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield each wrapped function with its wrapper, from the inside out."""
    chain = _chain(function)[::-1]
    return itertools.pairwise(chain)


def _contents(cell: CellType) -> object:
    """Return the content of a cell; None if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=64)
def _parse_file(text: str, filename: str) -> tuple[ast.Module, CodeType]:
    """Return the syntax tree and the code object of a file, or of a part of it."""
    return ast.parse(text), compile(text, filename, "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _texts_with(lines: list[str], line: int) -> Iterator[str]:
    """Yield the beginning of a file with the one class or function that has this line, and then the whole file. The
    first text is compiled several times faster. The compiler may refuse it, or compile the function to other code than
    that of the whole file, for example if an import is missing."""
    starts = [i for i, each in enumerate(lines) if each.startswith(("class ", "def ", "async def ", "@"))]
    if starts and starts[0] < line:
        start = max(i for i in starts if i < line)
        end = min((i for i in starts if i >= line), default=len(lines))
        yield "".join([*lines[: starts[0]], "\n" * (start - starts[0]), *lines[start:end]])
    yield "".join(lines)


def _tree_of(lines: list[str], code: CodeType) -> ast.Module | None:
    """Return a syntax tree of a file with a function that compiles to this code object; None if there is none."""
    for text in _texts_with(lines, code.co_firstlineno):
        with contextlib.suppress(SyntaxError, ValueError):
            tree, module = _parse_file(text, code.co_filename)
            candidates = (each for each in _codes(module) if each.co_firstlineno == code.co_firstlineno)
            if any(each == code for each in candidates):
                return tree
    return None


def definition_of(function: FunctionType) -> ast.FunctionDef:
    """Return a fresh copy of the definition of the innermost function."""
    inner = innermost(function)
    code = inner.__code__
    if inner is function and any(isinstance(_contents(cell), FunctionType) for cell in inner.__closure__ or ()):
        raise NotReadable("is behind a decorator that does not name the function that it wraps")
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, inner.__globals__)
    if not lines:
        raise NotReadable("has no source that can be read")
    if (tree := _tree_of(lines, code)) is None:
        raise NotReadable("was changed in its file since it was imported, or its source compiles to other code")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno:
            return _clone(node)
    raise NotReadable("is no function that is defined by def")


def _clone(node: Any) -> Any:
    """Return a deep copy of a syntax tree, with its positions. `node` is a node, a list of nodes, or a constant."""
    if isinstance(node, list):
        return [_clone(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields: dict[str, Any] = {name: _clone(getattr(node, name)) for name in node._fields if hasattr(node, name)}
    return ast.copy_location(type(node)(**fields), node) if hasattr(node, "lineno") else type(node)(**fields)


@dataclass(frozen=True)
class Rewritten:
    """The code that replaces the innermost function of a function. It does not refer to that function."""

    code: CodeType
    # The additional functions that the code calls, by the names of their variables.
    helpers: dict[str, Callable]
    attributes: dict[str, Any] = field(default_factory=dict)

    def build(self, function: FunctionType, exchanged: Mapping[str, Callable]) -> FunctionType:
        """Return `function` with this code in its innermost function; globals, closure and defaults stay the same.
        `exchanged` holds the functions that the code calls in place of globals, by the names of these globals."""
        inner = innermost(function)
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        cells |= {name: CellType(helper) for name, helper in self.helpers.items()}
        cells |= {exchanged_name(name): CellType(other) for name, other in exchanged.items()}
        result = _copy_with(inner, self.code, inner.__globals__, tuple(cells[name] for name in self.code.co_freevars))
        vars(result).update(self.attributes)
        return rebuild_wrappers(function, result)


def exchanged_name(name: str) -> str:
    """Return the name of the variable that holds the function in place of a global."""
    return f"_tigon_function_{name}_"


def compile_definition(
    definition: ast.FunctionDef, function: FunctionType, helpers: dict[str, Callable], exchanged: Sequence[str]
) -> Rewritten:
    """Return the code of this definition, which replaces the innermost function of `function`. `helpers`, and the
    functions in place of the globals in `exchanged`, become part of its closure."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in exchanged:
            node.id = exchanged_name(node.id)
        elif not isinstance(node, ast.keyword):
            # One of these fields holds the name that a node assigns, such as a nested function or an import.
            names = {getattr(node, each, None) for each in ("id", "arg", "name", "asname", "rest")}
            if assigned := names.intersection(exchanged):
                raise NotReadable(f"assigns to {assigned.pop()}, which is also a global")
    inner = innermost(function)
    fields: dict[str, Any] = {name: getattr(definition, name, None) for name in definition._fields}
    bare_definition = ast.FunctionDef(**fields)
    bare_definition.returns, bare_definition.decorator_list = None, []
    # Annotations are not evaluated again. Default values are copied from the stock function.
    for argument in ast.walk(bare_definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    bare_definition = ast.copy_location(bare_definition, definition)
    # Python puts the name of the class before names that begin with two underscores, so the definition must be inside
    # classes of the same names.
    body: ast.stmt = bare_definition
    for name in reversed(inner.__qualname__.rpartition("<locals>.")[2].split(".")[:-1]):
        body = ast.ClassDef(name=name, bases=[], keywords=[], body=[body], decorator_list=[], **NO_TYPE_PARAMETERS)
    outer_names = [*helpers, *map(exchanged_name, exchanged)]
    outer_names += [name for name in inner.__code__.co_freevars if name != "__class__"]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in outer_names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    factory = ast.FunctionDef(name="make", args=arguments, body=[body], decorator_list=[], **NO_TYPE_PARAMETERS)
    module = ast.fix_missing_locations(ast.Module([factory], type_ignores=[]))
    code = next(
        each
        for each in _codes(compile(module, inner.__code__.co_filename, "exec", dont_inherit=True))
        if each.co_name == definition.name
    )
    return Rewritten(code, helpers)
