"""Rewrite the source of a forward where one op computes what several consecutive statements compute.

    hidden = residual + hidden             |
    residual = hidden                      |   hidden, residual = add_norm(self.norm, residual, hidden)
    hidden = self.norm(hidden)             |

    residual = hidden                      |   hidden, residual = norm_with_residual(self.norm, hidden)
    hidden = self.norm(hidden)             |

    q = self.q(hidden).view(shape)         |   p = products(hidden, self.q, self.k)
    k = self.k(hidden).view(shape)         |   q = (p[0] if p else self.q(hidden)).view(shape)
                                           |   k = (p[1] if p else self.k(hidden)).view(shape)

`head_norm_statements` and `recurrences` have further patterns. All other statements stay as their author wrote them.
Whether `self.norm` is a norm that an op computes is known only when the forward runs; if it is not, the three functions
do what the original statements do. Another statement between those of a pattern prevents it.
"""

import ast
import copy
import itertools
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import NamedTuple

from tigon.recognition.rewriting.head_norm_statements import fuse_head_norms
from tigon.recognition.rewriting.recurrences import log_decay_of, repeat_heads, replace_log_decays, replace_repeats
from tigon.recognition.rewriting.source import NotReadable, Rewritten, compile_definition, definition_of, innermost
from tigon.recognition.rewriting.statements import (
    ADD_NORM,
    LOG_DECAY,
    NAMES,
    NORM_WITH_RESIDUAL,
    PRODUCTS,
    REPEAT_HEADS,
    ChildCall,
    child_call,
    parse_statements,
    single_target,
)

# The attribute of a rewritten function that names the children which `start_norm` runs.
HEAD_NORMS = "_tigon_head_norms_"


class _Match(NamedTuple):
    """The first statements of a block that match a pattern."""

    length: int
    replacement: list[ast.stmt]
    # For a norm: the name of the child, and the variables that hold its input or the residual afterwards.
    norm: str = ""
    residuals: frozenset[str] = frozenset()


_SUM_AND_NORM = re.compile(
    r"(?P<h>NAME) = (?P<a>NAME) \+ (?P<b>NAME)\n((?P<residual>NAME) = (?P=h)\n)?"
    r"(?P<y>NAME) = self\.(?P<norm>NAME)\((?P=h)\)\n".replace("NAME", r"[^\W\d]\w*")
)
_RESIDUAL_AND_NORM = re.compile(
    r"(?P<residual>NAME) = (?P<h>NAME)\n(?P<y>NAME) = self\.(?P<norm>NAME)\((?P=h)\)\n".replace("NAME", r"[^\W\d]\w*")
)


def _match_norm(statements: list[ast.stmt], variables: frozenset[str]) -> _Match | None:
    """Return the match of a sum or a residual, followed by its norm; None if the first statements do not match."""
    assignments = itertools.takewhile(lambda statement: isinstance(statement, ast.Assign), statements[:3])
    text = "".join(f"{ast.unparse(statement)}\n" for statement in assignments)
    match = _SUM_AND_NORM.match(text) or _RESIDUAL_AND_NORM.match(text)
    if match is None:
        return None
    h, y, norm, is_sum = match["h"], match["y"], match["norm"], match.re is _SUM_AND_NORM
    residual = match["residual"] or h
    # The norm and the residual must be assigned to two different variables, and a residual is no global.
    if residual == y or h == "self" or not (is_sum or h in variables):
        return None
    call = (
        f"{ADD_NORM}(self.{norm}, {match['a']}, {match['b']})" if is_sum else f"{NORM_WITH_RESIDUAL}(self.{norm}, {h})"
    )
    new = [f"{y}, {residual} = {call}"] + [f"{h} = {residual}"] * (h not in (y, residual))
    count = match[0].count("\n")
    # Tracebacks show the line of the norm.
    replacement = parse_statements("\n".join(new), statements[count - 1])
    return _Match(count, replacement, norm, frozenset((residual, h)) - {y})


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
        product = ast.Subscript(ast.Name(self.products, ast.Load()), ast.Constant(len(self.children) - 1), ast.Load())
        return ast.IfExp(ast.Name(self.products, ast.Load()), product, node)


# Inside one of these nodes, Python may skip an expression, evaluate it several times, or evaluate it with other values
# of the variables.
UNCERTAIN = (
    *(ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
DESCRIPTIVE = "shape", "size", "dim", "ndim", "dtype", "device"


def _only_call(statement: ast.stmt) -> ChildCall | None:
    """Return the call of a child if a statement calls one child, and certainly calls it once; None otherwise. Apart
    from that call, the statement must use the argument only to read attributes in `DESCRIPTIVE`."""
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
    """Return the match of consecutive assignments that each call one child with the same input, or None."""
    argument, count = "", 0
    children: set[str] = set()
    for statement in statements:
        target, call = single_target(statement), _only_call(statement)
        if target is None or call is None or call.child in children or call.argument != (argument or call.argument):
            break
        argument, count = call.argument, count + 1
        children.add(call.child)
        # Later calls would take another input.
        if target == argument:
            break
    if count < 2:
        return None
    products = f"_tigon_products_{number}_"
    transformer = _ProductCalls(argument, products)
    new_statements = [transformer.visit(statement) for statement in statements[:count]]
    children_called = ", ".join(f"self.{child}" for child in transformer.children)
    text = f"{products} = {PRODUCTS}({argument}, {children_called})"
    return _Match(count, [*parse_statements(text, statements[0]), *new_statements])


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
        while (fused := fuse_head_norms(result, scope, self.count)) is not None:
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


# Methods that return a tensor with the same values, and attributes that only describe a tensor.
HARMLESS = frozenset(
    (
        *DESCRIPTIVE,
        *("to", "float", "type", "type_as", "contiguous", "reshape", "view", "flatten", "requires_grad", "is_cuda"),
    )
)


def _parents(definition: ast.FunctionDef) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}


def _other_use(definition: ast.FunctionDef, name: str, norm: str, visited: frozenset[str] = frozenset()) -> str | None:
    """Describe a use of a variable that may depend on more than the values of its tensor; None if there is none. After
    rewriting, the residual and the input of the norm are two tensors with the same values. A hook on the residual would
    then receive only a part of the gradient, and a write in place would not reach the input of the norm."""
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
            if alias in visited or alias == name:
                continue
            if (use := _other_use(definition, alias, norm, visited | {name})) is None:
                continue
            return use
        if isinstance(parent, ast.Compare) and not any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
            continue
        if isinstance(parent, ast.Compare) and ast.unparse(parent).endswith((" is None", " is not None")):
            continue
        if isinstance(parent, ast.Call) and node in parent.args:
            # A function `torch.f`, `nn.functional.f` or `F.f` that does not write to its argument.
            first, *others = ast.unparse(parent.func).split(".")
            if others and first in ("torch", "nn", "F") and not others[-1].endswith("_"):
                continue
        use = f"`{ast.unparse(parent)[:60]}` (line {node.lineno})"
        return f"{use} may distinguish `{name}` from another tensor with the same values"
    return None


# These functions return the local variables of a function. The rewritten function has more local variables.
FRAME_READERS = frozenset(("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"))


def rewrite(
    function: FunctionType, helpers: Sequence[Callable], exchanged: Sequence[str], is_recurrent: bool = False
) -> Rewritten | str | None:
    """Return the code of the function with its statements rewritten; None if there is nothing to rewrite, or the reason
    why it, or a statement that resembles a pattern, stays as it is. `helpers` are the functions that the new statements
    call, in the order of `NAMES`; without them, all statements stay. `exchanged` names globals in whose place other
    functions are called. `is_recurrent` is True if these take the results of `repeat_heads`, and one op computes a
    decay."""
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
        named_helpers: dict[str, Callable] = dict(zip(NAMES, helpers, strict=False))
        if is_recurrent and replace_repeats(definition, exchanged):
            named_helpers[REPEAT_HEADS] = repeat_heads
        if is_recurrent and replace_log_decays(definition):
            named_helpers[LOG_DECAY] = log_decay_of
        result = compile_definition(definition, function, named_helpers, exchanged)
        result.attributes[HEAD_NORMS] = tuple(rewriter.head_norms)
        result.build(function, dict.fromkeys(exchanged, rewrite))
        return result
    except NotReadable as error:
        return f"its forward {error}"
