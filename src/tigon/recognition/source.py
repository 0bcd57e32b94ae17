"""Read the source of a loaded function, and build a function of changed source in its place.

The file of a function may have changed since it was imported. So the whole file is compiled again, and its source is
used only if the resulting code object equals the loaded one: constants, names, instructions, jumps and lines. This
module does not depend on particular instructions of the bytecode, so it works with every version of Python.

A function may stand behind wrappers (`functools.wraps`), as transformers wraps the forward of decoder layers. Then the
innermost function is read and replaced, and each wrapper is built again around it, with its own code and closure.
"""

import ast
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType

__all__ = [
    "CodeState",
    "NotReadable",
    "cached_by_code",
    "code_state",
    "compiled",
    "definition_of",
    "innermost",
    "is_unchanged",
    "rebuilt",
]


class NotReadable(Exception):
    """The source of a function cannot be used. The message is a clause that follows "its forward"."""


# --- wrappers --------------------------------------------------------------------------------------


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
    """What a function and the functions that it wraps run: their code, and the defaults of their arguments."""
    return tuple((each, each.__code__, each.__defaults__, each.__kwdefaults__) for each in _chain(function))


def is_unchanged(state: CodeState) -> bool:
    """Whether nobody has given the functions other code or other defaults since."""
    for function, code, defaults, by_name in state:
        if (
            function.__code__ is not code
            or function.__defaults__ is not defaults
            or function.__kwdefaults__ is not by_name
        ):
            return False
    return True


def cached_by_code(compute: Callable) -> Callable:
    """Decorate a function whose first argument is one: its result is cached until that argument has other code."""
    results: dict[tuple, tuple[CodeState, object]] = {}

    @functools.wraps(compute)
    def look_up(function: FunctionType, *args: object) -> object:
        key = function, *args
        known = results.get(key)
        if known is None or not is_unchanged(known[0]):
            known = results[key] = code_state(function), compute(function, *args)
        return known[1]

    look_up.cache_clear = results.clear
    return look_up


def _copy(function: FunctionType, code: CodeType, scope: dict, closure: tuple[CellType, ...]) -> FunctionType:
    result = FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__, result.__module__ = function.__kwdefaults__, function.__module__
    result.__qualname__ = function.__qualname__
    result.__dict__.update(function.__dict__)
    return result


def rebuilt(function: FunctionType, inner: FunctionType) -> FunctionType:
    """Return copies of the wrappers of `function` around `inner`, which takes the place of the innermost function.

    Raises:
        NotReadable: A wrapper does not hold the function that it wraps in its closure, so it cannot be replaced there.
    """
    result = inner
    for wrapped, wrapper in _pairs(function):
        cells = wrapper.__closure__ or ()
        if not any(_holds(cell, wrapped) for cell in cells):
            raise NotReadable(f"is behind a wrapper ({wrapper.__module__}) that does not hold what it wraps")
        closure = tuple(CellType(result) if _holds(cell, wrapped) else cell for cell in cells)
        result = _copy(wrapper, wrapper.__code__, wrapper.__globals__, closure)
        result.__wrapped__ = inner
    return result


def _pairs(function: FunctionType) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield each wrapped function with its wrapper, from the inside out."""
    chain = _chain(function)[::-1]
    return itertools.pairwise(chain)


def _holds(cell: CellType, function: FunctionType) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # The cell is empty.
        return False


# --- source ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _parsed(text: str, filename: str) -> tuple[ast.Module, CodeType]:
    return ast.parse(text), compile(text, filename, "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_loaded(text: str, code: CodeType) -> ast.Module | None:
    """Return the syntax tree of a file if one of its functions compiles to this code object; None otherwise."""
    tree, module = _parsed(text, code.co_filename)
    candidates = (each for each in _codes(module) if each.co_firstlineno == code.co_firstlineno)
    return tree if any(each == code for each in candidates) else None


def definition_of(function: FunctionType) -> ast.FunctionDef:
    """Return a fresh copy of the definition of the innermost function.

    Raises:
        NotReadable: There is no source, or the loaded code was not compiled from it.
    """
    inner = innermost(function)
    code = inner.__code__
    if inner is function and any(isinstance(_contents(cell), FunctionType) for cell in inner.__closure__ or ()):
        raise NotReadable("is behind a decorator that does not tell what it wraps")
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, inner.__globals__))
    if not text:
        raise NotReadable("has no source that can be read")
    try:
        tree = _is_loaded(text, code)
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        raise NotReadable("was changed in its file since it was imported, or its source does not give its code")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno:
            return _cloned(node)
    raise NotReadable("is no function that is defined by def")


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _cloned(node: ast.AST) -> ast.AST:
    """Return a deep copy of a syntax tree, with its positions."""
    if isinstance(node, list):
        return [_cloned(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: _cloned(getattr(node, name)) for name in node._fields if hasattr(node, name)}
    return ast.copy_location(type(node)(**fields), node) if hasattr(node, "lineno") else type(node)(**fields)


def compiled(definition: ast.FunctionDef, function: FunctionType, given: dict[str, Callable]) -> FunctionType:
    """Return `function` with its innermost function replaced by this definition; globals and closure stay the same.

    `given` holds the additional functions that the definition calls, by name. They become part of its closure.
    """
    inner = innermost(function)
    stripped = ast.FunctionDef(**{name: getattr(definition, name, None) for name in definition._fields})
    stripped.returns, stripped.decorator_list = None, []
    # Annotations are not evaluated again. Default values are copied from the stock function.
    for argument in ast.walk(stripped.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    stripped = ast.copy_location(stripped, definition)
    # Python mangles names that begin with two underscores by the name of the class, so the classes are built around it.
    body: ast.stmt = stripped
    for name in reversed(inner.__qualname__.rpartition("<locals>.")[2].split(".")[:-1]):
        body = ast.ClassDef(name=name, bases=[], keywords=[], body=[body], decorator_list=[], type_params=[])
    around = [*given, *(name for name in inner.__code__.co_freevars if name != "__class__")]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in around], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    factory = ast.FunctionDef(name="make", args=arguments, body=[body], decorator_list=[], type_params=[])
    module = ast.fix_missing_locations(ast.Module([factory], type_ignores=[]))
    code = next(
        each
        for each in _codes(compile(module, inner.__code__.co_filename, "exec", dont_inherit=True))
        if each.co_name == definition.name
    )
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    closure = tuple(CellType(given[name]) if name in given else cells[name] for name in code.co_freevars)
    return rebuilt(function, _copy(inner, code, inner.__globals__, closure))
