"""Compute the decay of a linear recurrence by one op, and pass it heads of queries and keys that are not repeated yet.

    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)   |   log_decay_of(self.A_log, ...)
    q = q.repeat_interleave(n, dim=2)                                      |   repeat_heads(q, n, dim=2)

`a` may be any expression. The function in place of a rule takes the result of `repeat_heads`, which holds the heads and
their number of copies. All later uses of such a variable must be arguments of such a function.
"""

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.mixers.log_decay import log_decay
from tigon.recognition.rewriting.statements import LOG_DECAY, REPEAT_HEADS, single_target
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import PLAIN

SOFTPLUS = F.softplus


def log_decay_of(a_log: Any, softplus: Any, a: Any, bias: Any) -> Tensor:
    """Return -a_log.float().exp() * softplus(a.float() + bias)."""
    # A compiler fuses these operations itself.
    if softplus is SOFTPLUS and not torch.compiler.is_compiling() and _is_decay(a, a_log, bias):
        return log_decay(a, a_log, bias)
    return -a_log.float().exp() * softplus(a.float() + bias)


def _is_decay(a: Any, a_log: Any, bias: Any) -> bool:
    if any(type(x) not in PLAIN for x in (a, a_log, bias)) or a.dim() == 0 or has_active_transform():
        return False
    is_head = a_log.shape == bias.shape == a.shape[-1:]
    return is_head and a.device == a_log.device == bias.device and a.is_floating_point()


class _LogDecays(ast.NodeTransformer):
    """Replaces the expression, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.BinOp(
                ast.UnaryOp(ast.USub(), ast.Call(ast.Attribute(rate, "exp"), [], [])),
                ast.Mult(),
                ast.Call(ast.Attribute(_, "softplus") as softplus, [ast.BinOp(x, ast.Add(), bias)], []),
            ):
                a_log, a = _widened(rate), _widened(x)
                if a_log is not None and a is not None:
                    self.count += 1
                    name = ast.Name(LOG_DECAY, ast.Load())
                    return ast.copy_location(ast.Call(name, [a_log, softplus, a, bias], []), node)
        return node


def _widened(node: ast.expr) -> ast.expr | None:
    """Return x if an expression is `x.float()`."""
    match node:
        case ast.Call(ast.Attribute(x, "float"), [], []):
            return x
    return None


def replace_log_decays(definition: ast.FunctionDef) -> int:
    """Replace the expressions in a function. Return their number."""
    transformer = _LogDecays()
    transformer.visit(definition)
    return transformer.count


class RepeatedHeads(NamedTuple):
    """The tensor that `heads.repeat_interleave(copies, dim=2)` returns, before it is computed."""

    heads: Tensor
    copies: int

    def compute(self) -> Tensor:
        return self.heads.repeat_interleave(self.copies, dim=2)


def repeat_heads(x: Any, copies: Any, dim: int) -> Any:
    """Return `x.repeat_interleave(copies, dim=2)`, not computed yet if x is a tensor [B, T, H, D]."""
    if type(x) in PLAIN and x.dim() == 4 and type(copies) is int and copies > 0:
        return RepeatedHeads(x, copies)
    return x.repeat_interleave(copies, dim=dim)


def replace_repeats(definition: ast.FunctionDef, functions: Sequence[str]) -> int:
    """Replace the statements that repeat heads for calls of these functions. Return the number of these statements."""
    nodes = list(ast.walk(definition))
    if any(isinstance(node, (ast.For, ast.While, ast.AsyncFor)) for node in nodes):
        # A statement at the end of a loop comes before those at its beginning.
        return 0
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in functions]
    arguments = {id(value) for call in calls for value in (*call.args, *(each.value for each in call.keywords))}
    count = 0
    for statement in nodes:
        if not isinstance(statement, ast.Assign) or (repeat := _repeat_of(statement)) is None:
            continue
        # The line and the column of an end are known for every statement that Python has parsed.
        end: Any = statement.end_lineno, statement.end_col_offset
        variable = repeat.func.value.id
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
        later_uses = [node for node in uses if (node.lineno, node.col_offset) > end]
        if later_uses and all(id(node) in arguments for node in later_uses):
            name, heads = ast.Name(REPEAT_HEADS, ast.Load()), repeat.func.value
            repeat.func, repeat.args = ast.copy_location(name, heads), [heads, *repeat.args]
            count += 1
    return count


def _repeat_of(statement: ast.Assign) -> Any:
    """Return the call if a statement is `x = x.repeat_interleave(n, dim=2)`."""
    call, target = statement.value, single_target(statement)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or len(call.args) != 1:
        return None
    is_repeat = target is not None and ast.unparse(call.func) == f"{target}.repeat_interleave"
    has_dim = [(each.arg, ast.unparse(each.value)) for each in call.keywords] == [("dim", "2")]
    return call if is_repeat and has_dim and not isinstance(call.args[0], ast.Starred) else None
