"""Rewrite the source of a forward where one op computes what several consecutive statements compute.

    hidden = residual + hidden             |
    residual = hidden                      |   hidden, residual = add_norm(self.norm, residual, hidden)
    hidden = self.norm(hidden)             |

    residual = hidden                      |   hidden, residual = norm_with_residual(self.norm, hidden)
    hidden = self.norm(hidden)             |

    q = self.q(hidden).view(shape)         |   p = products(hidden, self.q, self.k)
    k = self.k(hidden).view(shape)         |   q = (p[0] if p else self.q(hidden)).view(shape)
                                           |   k = (p[1] if p else self.k(hidden)).view(shape)

The norms of queries and keys with the rotary embedding after them are replaced too
(`tigon.recognition.rewriting.head_norm_statements`).

All other statements of the forward stay as their author wrote them. Whether `self.norm` is a norm that an op computes
is known only when the forward runs. If it is not, the three functions do what the original statements do. The variables
may have other names than here. Another statement between those of a pattern prevents the rewriting.
"""

import ast
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

from tigon.recognition.rewriting.head_norm_statements import fuse_head_norms
from tigon.recognition.rewriting.source import NotReadable, Rewritten, compile_definition, definition_of, innermost

# The names by which the rewritten source calls the functions. No forward uses such names.
ADD_NORM, NORM_WITH_RESIDUAL, PRODUCTS, START_NORM, NORM_ROPE = NAMES = (
    "_tigon_add_norm_",
    "_tigon_norm_with_residual_",
    "_tigon_products_",
    "_tigon_start_norm_",
    "_tigon_norm_rope_",
)
# The attribute of a rewritten function that names the children which `start_norm` runs.
HEAD_NORMS = "_tigon_head_norms_"


# --- statements ------------------------------------------------------------------------------------


class ChildCall(NamedTuple):
    """The names in a call `self.child(argument)`."""

    child: str
    argument: str


def child_call(node: ast.AST) -> ChildCall | None:
    """Return the names of the child and the argument of a call `self.child(argument)`; None for any other node."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    function, argument = node.func, node.args[0]
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return None
    is_child = function.value.id == "self" and isinstance(argument, ast.Name)
    return ChildCall(function.attr, argument.id) if is_child and isinstance(argument, ast.Name) else None


@dataclass(frozen=True)
class _Assignment:
    """The statement `target = value`, where the target is a plain name."""

    target: str
    value: ast.expr

    @staticmethod
    def of(statement: ast.stmt) -> "_Assignment | None":
        """Return the assignment that a statement is; None for any other statement."""
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target = statement.targets[0]
        return _Assignment(target.id, statement.value) if isinstance(target, ast.Name) else None

    @property
    def summands(self) -> tuple[str, str] | None:
        """Return the names `(a, b)` if the value is `a + b`."""
        value = self.value
        if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
            return None
        left, right = value.left, value.right
        return (left.id, right.id) if isinstance(left, ast.Name) and isinstance(right, ast.Name) else None

    @property
    def alias(self) -> str | None:
        """Return the name `a` if the value is `a`."""
        return self.value.id if isinstance(self.value, ast.Name) else None

    @property
    def call(self) -> ChildCall | None:
        """Return the names if the value is `self.child(a)`."""
        return child_call(self.value)


def _name(name: str, store: bool = False) -> ast.Name:
    return ast.Name(name, ast.Store() if store else ast.Load())


def _attribute(child: str) -> ast.Attribute:
    return ast.Attribute(_name("self"), child, ast.Load())


def _assign(targets: list[str], value: ast.expr) -> ast.Assign:
    names: list[ast.expr] = [_name(target, store=True) for target in targets]
    return ast.Assign([ast.Tuple(names, ast.Store()) if len(names) > 1 else names[0]], value)


# --- patterns --------------------------------------------------------------------------------------


class _Match(NamedTuple):
    """The first statements of a block that match a pattern."""

    # The number of statements that match.
    length: int
    # The statements that replace them.
    replacement: list[ast.stmt]
    # For a norm: the name of the child, and the variables that hold its input or the residual afterwards.
    norm: str = ""
    residuals: frozenset[str] = frozenset()


def _match_norm(statements: list[ast.stmt], variables: frozenset[str]) -> _Match | None:
    """Return the match of a sum or a residual, followed by its norm; None if the first statements do not match.

    `variables` are the local variables of the function.
    """
    first, *others = [_Assignment.of(s) for s in statements[:3]]
    if first is None:
        return None
    second, third = [*others, None, None][:2]
    summands = first.summands
    if summands and second is not None and second.alias == first.target:
        # h = a + b; residual = h; y = norm(h)
        h, residual, last, count = first.target, second.target, third, 3
    elif summands:
        # h = a + b; y = norm(h)
        h, residual, last, count = first.target, first.target, second, 2
    elif first.alias is not None and first.alias in variables:
        # residual = h; y = norm(h), where h is no global
        h, residual, last, count = first.alias, first.target, second, 2
    else:
        return None
    call = last.call if last is not None else None
    # The norm and the residual must be assigned to two different variables.
    if last is None or call is None or call.argument != h or residual == last.target or h == "self":
        return None
    function, inputs = (ADD_NORM, summands) if summands else (NORM_WITH_RESIDUAL, (h,))
    fused_call = ast.Call(_name(function), [_attribute(call.child), *map(_name, inputs)], [])
    replacement: list[ast.stmt] = [_assign([last.target, residual], fused_call)]
    if h not in (last.target, residual):
        replacement.append(_assign([h], _name(residual)))
    # Tracebacks show the line of the norm.
    replacement = [ast.copy_location(statement, statements[count - 1]) for statement in replacement]
    return _Match(count, replacement, call.child, frozenset((residual, h)) - {last.target})


class _ProductCalls(ast.NodeTransformer):
    """Replaces `self.child(argument)` by `p[i] if p else self.child(argument)`, where `p` names the products."""

    def __init__(self, argument: str, products: str) -> None:
        self.argument, self.products = argument, products
        self.children: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        call = child_call(node)
        if call is None or call.argument != self.argument:
            return self.generic_visit(node)
        self.children.append(call.child)
        product = ast.Subscript(_name(self.products), ast.Constant(len(self.children) - 1), ast.Load())
        return ast.IfExp(_name(self.products), product, node)


# Inside one of these nodes, Python may skip an expression, evaluate it several times, or evaluate it with other values
# of the variables.
UNCERTAIN = (
    *(ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
# Attributes that describe a tensor and do not change it.
DESCRIPTIVE = "shape", "size", "dim", "ndim", "dtype", "device"


def _only_call(statement: ast.stmt) -> ChildCall | None:
    """Return the call of a child if a statement calls one child, and certainly calls it once; None otherwise.

    Apart from that call, the statement must use the argument only to read attributes in `DESCRIPTIVE`.
    """
    nodes = list(ast.walk(statement))
    calls = [call for call in map(child_call, nodes) if call is not None]
    if len(calls) != 1 or any(isinstance(node, UNCERTAIN) for node in nodes):
        return None
    argument = calls[0].argument
    descriptions = sum(
        isinstance(node, ast.Attribute) and node.attr in DESCRIPTIVE and getattr(node.value, "id", None) == argument
        for node in nodes
    )
    loads = sum(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id == argument for n in nodes)
    return calls[0] if loads == descriptions + 1 else None


def _match_products(statements: list[ast.stmt], number: int) -> _Match | None:
    """Return the match of consecutive assignments that each call one child with the same input, or None.

    `number` makes the name of the variable that holds the products unique.
    """
    argument, count = "", 0
    children: set[str] = set()
    for statement in statements:
        assignment, call = _Assignment.of(statement), _only_call(statement)
        if assignment is None or call is None or call.child in children or call.argument != (argument or call.argument):
            break
        argument, count = call.argument, count + 1
        children.add(call.child)
        # Later calls would take another input.
        if assignment.target == argument:
            break
    if count < 2:
        return None
    products = f"_tigon_products_{number}_"
    transformer = _ProductCalls(argument, products)
    new_statements = [transformer.visit(statement) for statement in statements[:count]]
    fused_call = ast.Call(_name(PRODUCTS), [_name(argument), *map(_attribute, transformer.children)], [])
    new_statements.insert(0, ast.copy_location(_assign([products], fused_call), statements[0]))
    return _Match(count, new_statements)


class _Rewriter:
    """Rewrites the blocks of statements of a function, and counts the matches."""

    def __init__(self, variables: frozenset[str], definition: ast.FunctionDef, scope: dict) -> None:
        self.count, self.variables, self.scope = 0, variables, scope
        self.stock = copy.deepcopy(definition)
        self.head_norms: list[str] = []
        # The reason why statements that resemble a match stay as they are.
        self.refusal: str | None = None

    def match_norm(self, statements: list[ast.stmt]) -> _Match | None:
        """Return the match of `_match_norm`, but refuse a residual that the function uses for more than arithmetic."""
        match = _match_norm(statements, self.variables)
        if match is None:
            return None
        for name in sorted(match.residuals):
            if (use := _other_use(self.stock, name, match.norm)) is not None:
                self.refusal = f"its forward does more with the residual of a norm: {use}"
                return None
        return match

    def rewrite_block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements with every match replaced. Blocks inside of other statements are rewritten too."""
        result: list[ast.stmt] = []
        index = 0
        while index < len(statements):
            rest = statements[index:]
            match = self.match_norm(rest) or _match_products(rest, self.count)
            if match is None:
                self.rewrite_inside(statements[index])
                result.append(statements[index])
                index += 1
                continue
            result += match.replacement
            self.count += 1
            index += match.length
        # The norms come last, because the projections in their arguments must be consecutive statements above.
        scope = {name: value for name, value in self.scope.items() if name not in self.variables}
        while (fused := fuse_head_norms(result, scope, START_NORM, NORM_ROPE, self.count)) is not None:
            result, norms = fused
            self.head_norms += norms
            self.count += 1
        return result

    def rewrite_inside(self, statement: ast.stmt) -> None:
        """Rewrite the blocks of a branch, a loop or a `with` statement."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(statement, name, None), list):
                setattr(statement, name, self.rewrite_block(block))


# --- other uses of a residual ----------------------------------------------------------------------

# Methods that return a tensor with the same values, and attributes that only describe a tensor.
HARMLESS = frozenset(
    (
        *DESCRIPTIVE,
        *("to", "float", "type", "type_as", "contiguous", "reshape", "view", "flatten", "requires_grad", "is_cuda"),
    )
)


def _parents(definition: ast.FunctionDef) -> dict[ast.AST, ast.AST]:
    """Return the parent of each node."""
    return {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}


def _other_use(
    definition: ast.FunctionDef, name: str, norm: str, visited_names: frozenset[str] = frozenset()
) -> str | None:
    """Describe a use of a variable that may depend on more than the values of its tensor; None if there is none.

    After rewriting, the residual and the input of the norm are two tensors with the same values. A hook on the residual
    would then receive only a part of the gradient, and a write in place would not reach the input of the norm.
    """
    parents = _parents(definition)
    for node in ast.walk(definition):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return f"`{name}` is changed in place (line {node.lineno})"
        if not (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)):
            continue
        parent = parents[node]
        if isinstance(parent, (ast.BinOp, ast.UnaryOp)) or child_call(parent) == (norm, name):
            continue
        if isinstance(parent, ast.Attribute) and parent.attr in HARMLESS:
            continue
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            alias = parent.targets[0].id
            if alias in visited_names or alias == name:
                continue
            if (use := _other_use(definition, alias, norm, visited_names | {name})) is None:
                continue
            return use
        if isinstance(parent, ast.Compare) and not any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
            continue
        if isinstance(parent, ast.Compare) and ast.unparse(parent).endswith((" is None", " is not None")):
            continue
        if isinstance(parent, ast.Call) and node in parent.args and _is_function_of_torch(parent.func):
            continue
        use = f"`{ast.unparse(parent)[:60]}` (line {node.lineno})"
        return f"{use} may distinguish `{name}` from another tensor with the same values"
    return None


def _is_function_of_torch(function: ast.expr) -> bool:
    """Return True if a function is `torch.f`, `nn.functional.f` or `F.f` and does not write to its argument."""
    words = ast.unparse(function).split(".")
    return len(words) > 1 and words[0] in ("torch", "nn", "F") and not words[-1].endswith("_")


# --- functions -------------------------------------------------------------------------------------

# These functions return the local variables of a function. The rewritten function has more local variables.
FRAME_READERS = frozenset(("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"))


def rewrite(function: FunctionType, helpers: Sequence[Callable], exchanged: Sequence[str]) -> Rewritten | str | None:
    """Return the code of the function with its statements rewritten; None if there is nothing to rewrite.

    A string is the reason why the function cannot be rewritten, or why statements that resemble a pattern stay as they
    are.

    Args:
        function: The function.
        helpers: The functions that the rewritten statements call, in the order of `NAMES`. Without them, all statements
            stay as they are.
        exchanged: The names of globals in whose place the function calls other functions.
    """
    try:
        definition = definition_of(function)
        inner = innermost(function)
        code = inner.__code__
        if not FRAME_READERS.isdisjoint(code.co_names):
            raise NotReadable("reads its own frame")
        rewriter = _Rewriter(frozenset((*code.co_varnames, *code.co_cellvars)), definition, inner.__globals__)
        if helpers:
            definition.body = rewriter.rewrite_block(definition.body)
        if not (rewriter.count or exchanged):
            return rewriter.refusal
        result = compile_definition(definition, function, dict(zip(NAMES, helpers, strict=False)), exchanged)
        result.attributes[HEAD_NORMS] = tuple(rewriter.head_norms)
        result.build(function, dict.fromkeys(exchanged, rewrite))
        return result
    except NotReadable as error:
        return f"its forward {error}"
