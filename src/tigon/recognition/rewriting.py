"""Rewrite the source of a forward where consecutive statements are what one op does at once.

    hidden = residual + hidden             |
    residual = hidden                      |   hidden, residual = add_norm(self.norm, residual, hidden)
    hidden = self.norm(hidden)             |

    residual = hidden                      |   hidden, residual = norm_pass(self.norm, hidden)
    hidden = self.norm(hidden)             |

    q = self.q(hidden).view(shape)         |   p = products(hidden, self.q, self.k)
    k = self.k(hidden).view(shape)         |   q = (p[0] if p else self.q(hidden)).view(shape)
                                           |   k = (p[1] if p else self.k(hidden)).view(shape)

Everything else of the forward stays as its author wrote it. What `self.norm` is shows when it runs: the three functions
do what the statements did wherever they cannot do better. Names do not matter; a statement in between does.
"""

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType

__all__ = ["ADD_NORM", "NORM_PASS", "PRODUCTS", "rewrite"]

# How the rewritten source calls them; no name of anybody's.
ADD_NORM, NORM_PASS, PRODUCTS = NAMES = ("__tigon_add_norm", "__tigon_norm_pass", "__tigon_products")


# --- what statements are ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Assignment:
    """`target = value`, of a plain name."""

    target: str
    value: ast.expr

    @staticmethod
    def of(statement: ast.stmt) -> "_Assignment | None":
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        plain = plain and isinstance(statement.targets[0], ast.Name)
        return _Assignment(statement.targets[0].id, statement.value) if plain else None

    @property
    def added(self) -> tuple[str, str] | None:
        """Of `a + b`."""
        value = self.value
        names = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and (value.left, value.right)
        return (names[0].id, names[1].id) if names and all(isinstance(x, ast.Name) for x in names) else None

    @property
    def alias(self) -> str | None:
        """Of `a`."""
        return self.value.id if isinstance(self.value, ast.Name) else None

    @property
    def child(self) -> tuple[str, str] | None:
        """Of `self.child(a)`."""
        return _child_call(self.value)


def _child_call(node: ast.AST) -> tuple[str, str] | None:
    """child and argument of `self.child(argument)`."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    function, argument = node.func, node.args[0]
    own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
    return (function.attr, argument.id) if own and isinstance(argument, ast.Name) else None


def _name(name: str, store: bool = False) -> ast.Name:
    return ast.Name(name, ast.Store() if store else ast.Load())


def _attribute(child: str) -> ast.Attribute:
    return ast.Attribute(_name("self"), child, ast.Load())


def _assign(targets: list[str], value: ast.expr) -> ast.Assign:
    target = ast.Tuple([_name(t, True) for t in targets], ast.Store()) if len(targets) > 1 else _name(targets[0], True)
    return ast.Assign([target], value)


# --- patterns --------------------------------------------------------------------------------------


def _norm(statements: list[ast.stmt], variables: frozenset[str]) -> tuple[int, list[ast.stmt]] | None:
    """A sum or a residual, and the norm of it: how many statements they are, and what takes their place."""
    first, *others = [_Assignment.of(s) for s in statements[:3]]
    if first is None:
        return None
    added = first.added
    aliases = others and others[0] is not None and others[0].alias == first.target
    if added and aliases:  # h = a + b; r = h; y = norm(h)
        h, kept, last = first.target, others[0].target, others[1] if len(others) > 1 else None
    elif added:  # h = a + b; y = norm(h)
        h, kept, last = first.target, first.target, others[0] if others else None
    elif first.alias in variables:  # r = h; y = norm(h), of no global
        h, kept, last = first.alias, first.target, others[0] if others else None
    else:
        return None
    if last is None or last.child is None or last.child[1] != h or kept == last.target or h == "self":
        return None
    child, y = last.child[0], last.target
    function, given = (ADD_NORM, added) if added else (NORM_PASS, (h,))
    call = ast.Call(_name(function), [_attribute(child), *map(_name, given)], [])
    made: list[ast.stmt] = [_assign([y, kept], call)]
    if h not in (y, kept):
        made.append(_assign([h], _name(kept)))
    count = 2 + bool(added and aliases)
    return count, [ast.copy_location(new, statements[count - 1]) for new in made]  # errors show the norm's line


class _Taken(ast.NodeTransformer):
    """`self.child(argument)` becomes the product that was made before, if it was."""

    def __init__(self, argument: str, made: str) -> None:
        self.argument, self.made, self.children = argument, made, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        call = _child_call(node)
        if call is None or call[1] != self.argument:
            return self.generic_visit(node)
        self.children.append(call[0])
        product = ast.Subscript(_name(self.made), ast.Constant(len(self.children) - 1), ast.Load())
        return ast.IfExp(_name(self.made), product, node)


# What is in these may be computed never, often, or with other values of a name; and a name may get another value.
UNCERTAIN = (
    *(ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
DESCRIBES = "shape", "size", "dim", "ndim", "dtype", "device"  # a tensor, and leaves it as it is


def _call(statement: ast.stmt) -> tuple[str, str] | None:
    """The one call of a child, of what else the statement only describes; None if that is not sure."""
    nodes = list(ast.walk(statement))
    calls = list(filter(None, map(_child_call, nodes)))
    if len(calls) != 1 or any(isinstance(node, UNCERTAIN) for node in nodes):
        return None
    described = sum(
        isinstance(node, ast.Attribute) and node.attr in DESCRIBES and getattr(node.value, "id", None) == calls[0][1]
        for node in nodes
    )
    loaded = sum(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id == calls[0][1] for n in nodes)
    return calls[0] if loaded == described + 1 else None


def _products(statements: list[ast.stmt], number: int) -> tuple[int, list[ast.stmt]] | None:
    """Consecutive assignments, each of one call of a child for the same input."""
    argument, count, children = None, 0, set()
    for statement in statements:
        assignment, call = _Assignment.of(statement), _call(statement)
        if assignment is None or call is None or call[0] in children or call[1] != (argument or call[1]):
            break
        argument, count = call[1], count + 1
        children.add(call[0])
        if assignment.target == argument:  # the others would see another
            break
    if count < 2:
        return None
    made = f"__tigon_products_{number}"
    taken = _Taken(argument, made)
    rewritten = [taken.visit(statement) for statement in statements[:count]]
    call = ast.Call(_name(PRODUCTS), [_name(argument), *map(_attribute, taken.children)], [])
    return count, [ast.copy_location(_assign([made], call), statements[0]), *rewritten]


class _Rewriter:
    """Goes through a function's blocks of statements."""

    def __init__(self, variables: frozenset[str]) -> None:
        self.found, self.variables = 0, variables

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result, at = [], 0
        while at < len(statements):
            left = statements[at:]
            match = _norm(left, self.variables) or _products(left, self.found)
            if match is None:
                self._inside(statements[at])
                result.append(statements[at])
                at += 1
                continue
            count, made = match
            result += made
            self.found += 1
            at += count
        return result

    def _inside(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(statement, name, None), list):
                setattr(statement, name, self.block(block))


# --- functions -------------------------------------------------------------------------------------

FRAMES = frozenset(("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"))  # who asks sees more names
OPERATIONS = "BINARY_", "INPLACE_", "UNARY_", "COMPARE_"


def _definition(function: Callable) -> ast.FunctionDef | None:
    """The source of a plain method, if it still is that of its code."""
    if type(function) is not FunctionType or function.__closure__ or hasattr(function, "__wrapped__"):
        return None
    if not FRAMES.isdisjoint(function.__code__.co_names):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return None
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    return definition if _traits(_compiled(definition, function)) == _traits(function.__code__) else None


def _traits(code: CodeType) -> tuple:
    """What tells one body from another. Not the bytes: a call of an imported name is compiled otherwise by itself."""
    constants = tuple(map(repr, (c for c in code.co_consts if not isinstance(c, CodeType))))
    steps = [step for step in dis.get_instructions(code) if step.opname != "PUSH_NULL"]  # of such a call
    done = tuple((s.opname, s.argrepr) for s in steps if s.opcode in dis.haslocal or s.opname.startswith(OPERATIONS))
    return code.co_names, code.co_varnames, code.co_argcount, constants, len(steps), done


def _compiled(definition: ast.FunctionDef, function: FunctionType, *free: str) -> CodeType:
    """The code of a definition, in which the names `free` come from a closure."""
    definition = ast.FunctionDef(**{**{f: getattr(definition, f, None) for f in definition._fields}, "returns": None})
    for argument in ast.walk(definition.args):  # their values are those of the stock function
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in free], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    factory = ast.FunctionDef(name="make", args=arguments, body=[definition], decorator_list=[], type_params=[])
    module = ast.fix_missing_locations(ast.Module([factory], type_ignores=[]))
    code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    for _ in ("make", definition.name):
        code = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code


@functools.cache
def rewrite(function: Callable, add_norm: Callable, norm_pass: Callable, products: Callable) -> FunctionType | None:
    """The function with its statements rewritten, over the same globals; None if there is nothing to rewrite."""
    definition = _definition(function)
    if definition is None:
        return None
    code = function.__code__
    rewriter = _Rewriter(frozenset((*code.co_varnames, *code.co_cellvars)))
    definition.body = rewriter.block(definition.body)
    if not rewriter.found:
        return None
    code = _compiled(definition, function, *NAMES)
    given = dict(zip(NAMES, (add_norm, norm_pass, products), strict=True))
    cells = tuple(CellType(given[name]) for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__module__, made.__qualname__ = (
        function.__kwdefaults__,
        function.__module__,
        function.__qualname__,
    )
    return made
