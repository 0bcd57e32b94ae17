"""Rewrite the source of a forward where one op computes what consecutive statements compute.

    hidden = residual + hidden             |
    residual = hidden                      |   hidden, residual = add_norm(self.norm, residual, hidden)
    hidden = self.norm(hidden)             |

    residual = hidden                      |   hidden, residual = norm_pass(self.norm, hidden)
    hidden = self.norm(hidden)             |

    q = self.q(hidden).view(shape)         |   p = products(hidden, self.q, self.k)
    k = self.k(hidden).view(shape)         |   q = (p[0] if p else self.q(hidden)).view(shape)
                                           |   k = (p[1] if p else self.k(hidden)).view(shape)

All other statements of the forward stay as their author wrote them. The kind of `self.norm` is known only when the
forward runs, so the three functions do what the statements did wherever no op applies. The names of variables do not
matter. A statement in between prevents the rewriting.
"""

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

from tigon.recognition.source import NotReadable, cached_by_code, compiled, definition_of, innermost

__all__ = ["ADD_NORM", "NORM_PASS", "PRODUCTS", "overwritten_inputs", "rewrite"]

# The names by which the rewritten source calls the three functions. No forward uses such names.
ADD_NORM, NORM_PASS, PRODUCTS = NAMES = ("_tigon_add_norm_", "_tigon_norm_pass_", "_tigon_products_")


# --- statements ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Assignment:
    """The statement `target = value`, where the target is a plain name."""

    target: str
    value: ast.expr

    @staticmethod
    def of(statement: ast.stmt) -> "_Assignment | None":
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        plain = plain and isinstance(statement.targets[0], ast.Name)
        return _Assignment(statement.targets[0].id, statement.value) if plain else None

    @property
    def added(self) -> tuple[str, str] | None:
        """The names `(a, b)` if the value is `a + b`."""
        value = self.value
        names = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and (value.left, value.right)
        return (names[0].id, names[1].id) if names and all(isinstance(x, ast.Name) for x in names) else None

    @property
    def alias(self) -> str | None:
        """The name `a` if the value is `a`."""
        return self.value.id if isinstance(self.value, ast.Name) else None

    @property
    def child(self) -> tuple[str, str] | None:
        """The names `(child, a)` if the value is `self.child(a)`."""
        return _child_call(self.value)


def _child_call(node: ast.AST) -> tuple[str, str] | None:
    """Return the names of the child and the argument of a call `self.child(argument)`; None for any other node."""
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
    """Match a sum or a residual, followed by its norm.

    Returns:
        The number of statements that match, and the statements that replace them; None if the first ones do not match.
    """
    first, *others = [_Assignment.of(s) for s in statements[:3]]
    if first is None:
        return None
    added = first.added
    aliases = others and others[0] is not None and others[0].alias == first.target
    if added and aliases:  # h = a + b; r = h; y = norm(h)
        h, kept, last = first.target, others[0].target, others[1] if len(others) > 1 else None
    elif added:  # h = a + b; y = norm(h)
        h, kept, last = first.target, first.target, others[0] if others else None
    elif first.alias in variables:  # r = h; y = norm(h), where h is no global
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
    # Tracebacks show the line of the norm.
    return count, [ast.copy_location(new, statements[count - 1]) for new in made]


class _Taken(ast.NodeTransformer):
    """Replace `self.child(argument)` by `made[i] if made else self.child(argument)`; `made` names the products."""

    def __init__(self, argument: str, made: str) -> None:
        self.argument, self.made, self.children = argument, made, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        call = _child_call(node)
        if call is None or call[1] != self.argument:
            return self.generic_visit(node)
        self.children.append(call[0])
        product = ast.Subscript(_name(self.made), ast.Constant(len(self.children) - 1), ast.Load())
        return ast.IfExp(_name(self.made), product, node)


# An expression inside one of these may be evaluated never, several times, or with another value of a name.
UNCERTAIN = (
    *(ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
# Attributes that describe a tensor and do not change it.
DESCRIBES = "shape", "size", "dim", "ndim", "dtype", "device"


def _call(statement: ast.stmt) -> tuple[str, str] | None:
    """Return the names of the child and its argument if a statement calls one child, and certainly calls it once.

    Apart from that call, the statement may only read attributes in `DESCRIBES` of the argument. None otherwise.
    """
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
    """Match consecutive assignments that each call one child with the same input; the result is that of `_norm`."""
    argument, count, children = None, 0, set()
    for statement in statements:
        assignment, call = _Assignment.of(statement), _call(statement)
        if assignment is None or call is None or call[0] in children or call[1] != (argument or call[1]):
            break
        argument, count = call[1], count + 1
        children.add(call[0])
        # Later calls would take another input.
        if assignment.target == argument:
            break
    if count < 2:
        return None
    made = f"_tigon_products_{number}_"
    taken = _Taken(argument, made)
    rewritten = [taken.visit(statement) for statement in statements[:count]]
    call = ast.Call(_name(PRODUCTS), [_name(argument), *map(_attribute, taken.children)], [])
    return count, [ast.copy_location(_assign([made], call), statements[0]), *rewritten]


class _Rewriter:
    """Rewrites the blocks of statements of a function. `found` counts the matches."""

    def __init__(self, variables: frozenset[str], definition: ast.FunctionDef) -> None:
        self.found, self.variables = 0, variables
        self.stock = copy.deepcopy(definition)
        self.refusal: str | None = None

    def norm(self, statements: list[ast.stmt]) -> tuple[int, list[ast.stmt]] | None:
        """Match as `_norm` does, but refuse a residual that the function uses for more than arithmetic."""
        match = _norm(statements, self.variables)
        if match is None:
            return None
        count, replacement = match
        names = {n.id for new in replacement for t in new.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        names.discard(_Assignment.of(statements[count - 1]).target)  # the norm's own output
        norm = _Assignment.of(statements[count - 1]).child[0]
        for name in sorted(names):
            if (use := _other_use(self.stock, name, norm)) is not None:
                self.refusal = f"its forward does more with the residual of a norm: {use}"
                return None
        return match

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result, at = [], 0
        while at < len(statements):
            left = statements[at:]
            match = self.norm(left) or _products(left, self.found)
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


# --- other uses of a residual ----------------------------------------------------------------------

# Methods that return a tensor with the same values, and attributes that only describe a tensor.
HARMLESS = frozenset(
    (
        *DESCRIBES,
        "to",
        "float",
        "type",
        "type_as",
        "contiguous",
        "reshape",
        "view",
        "flatten",
        "requires_grad",
        "is_cuda",
    )
)


def _parents(definition: ast.FunctionDef) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}


def _other_use(definition: ast.FunctionDef, name: str, norm: str, seen: frozenset[str] = frozenset()) -> str | None:
    """Describe a use of a variable that may depend on more than the values of its tensor; None if there is none.

    After rewriting, the residual and the input of the norm are two tensors with the same values. A hook on the
    residual, or a write in place, would then affect only the gradient of the residual.
    """
    parents = _parents(definition)
    for node in ast.walk(definition):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return f"`{name}` is changed in place (line {node.lineno})"
        if not (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)):
            continue
        parent = parents[node]
        if isinstance(parent, (ast.BinOp, ast.UnaryOp)) or _child_call(parent) == (norm, name):
            continue
        if isinstance(parent, ast.Attribute) and parent.attr in HARMLESS:
            continue
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            alias = parent.targets[0].id
            if alias in seen or alias == name or (use := _other_use(definition, alias, norm, seen | {name})) is None:
                continue
            return use
        if isinstance(parent, ast.Compare) and not any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
            continue
        if isinstance(parent, ast.Compare) and ast.unparse(parent).endswith((" is None", " is not None")):
            continue
        if isinstance(parent, ast.Call) and node in parent.args and _is_function_of_torch(parent.func):
            continue
        return f"`{ast.unparse(parent)[:60]}` (line {node.lineno}) may tell `{name}` from a tensor of the same values"
    return None


def _is_function_of_torch(function: ast.expr) -> bool:
    """Return True if a function is `torch.f`, `nn.functional.f` or `F.f` and does not write to its argument."""
    words = ast.unparse(function).split(".")
    return len(words) > 1 and words[0] in ("torch", "nn", "F") and not words[-1].endswith("_")


# --- inputs that are overwritten -------------------------------------------------------------------


class _Values:
    """Tracks which variables hold the same tensor, and which tensors are written in place after a child read them."""

    def __init__(self) -> None:
        self.ids: dict[str, frozenset[int]] = {}
        self.takers: dict[int, set[str]] = {}
        # The line of the write, by the name of the child.
        self.overwritten: dict[str, int] = {}
        self.count = 0

    def of(self, name: str) -> frozenset[int]:
        if name not in self.ids:
            self.ids[name] = self.new()
        return self.ids[name]

    def new(self) -> frozenset[int]:
        self.count += 1
        return frozenset((self.count,))

    def write(self, name: str, line: int) -> None:
        for number in self.of(name):
            for child in self.takers.get(number, ()):
                self.overwritten.setdefault(child, line)

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: ast.stmt) -> None:
        blocks = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
        blocks = [block for block in blocks if isinstance(block, list)]
        if blocks and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            # The body of a loop is visited twice: a write may meet a tensor that a child read in the iteration before.
            repeats = 2 if isinstance(statement, (ast.For, ast.While)) else 1
            before, after = self.ids, [self.ids]
            for block in blocks:
                self.ids = dict(before)
                for _ in range(repeats):
                    self.block(block)
                after.append(self.ids)
            names = {name for ids in after for name in ids}
            self.ids = {name: frozenset().union(*(ids.get(name, frozenset()) for ids in after)) for name in names}
            return
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                if (call := _child_call(node)) is not None:
                    for number in self.of(call[1]):
                        self.takers.setdefault(number, set()).add(call[0])
                function = node.func
                in_place = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
                if in_place and function.attr.endswith("_") and not function.attr.startswith("requires_grad"):
                    self.write(function.value.id, node.lineno)
        target = statement.target if isinstance(statement, ast.AugAssign) else None
        for each in [target, *(statement.targets if isinstance(statement, ast.Assign) else [])]:
            if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name):
                self.write(each.value.id, statement.lineno)
        if isinstance(target, ast.Name):
            self.write(target.id, statement.lineno)
        if isinstance(statement, ast.Assign):
            value = statement.value
            for each in statement.targets:
                for name in (n.id for n in ast.walk(each) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)):
                    self.ids[name] = self.of(value.id) if isinstance(value, ast.Name) else self.new()


@cached_by_code
def overwritten_inputs(function: FunctionType) -> dict[str, int]:
    """Return the children whose input a forward writes in place after they have run, with the line of the write."""
    try:
        definition = definition_of(function)
    except NotReadable:
        return {}
    values = _Values()
    values.block(definition.body)
    return values.overwritten


# --- functions -------------------------------------------------------------------------------------

# These functions show the names of local variables, of which the rewritten function has more.
FRAMES = frozenset(("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"))


@cached_by_code
def rewrite(
    function: FunctionType, add_norm: Callable, norm_pass: Callable, products: Callable
) -> FunctionType | str | None:
    """Return the function with its statements rewritten, with the same globals; None if there is nothing to rewrite.

    A string is the reason why the function cannot be rewritten, or why statements that resemble a match stay as they
    are.
    """
    try:
        definition = definition_of(function)
        code = innermost(function).__code__
        if not FRAMES.isdisjoint(code.co_names):
            raise NotReadable("reads its own frame")
        rewriter = _Rewriter(frozenset((*code.co_varnames, *code.co_cellvars)), definition)
        definition.body = rewriter.block(definition.body)
        if not rewriter.found:
            return rewriter.refusal
        return compiled(definition, function, dict(zip(NAMES, (add_norm, norm_pass, products), strict=True)))
    except NotReadable as error:
        return f"its forward {error}"
