"""Pass heads of queries and keys to a grouped op without the copies that a forward makes for all heads of the values.

    q = q.repeat_interleave(n, dim=2)   |   q = repeat_heads(q, n, dim=2)
    o, s = rule(q, k, v, ...)           |   o, s = rule(q, k, v, ...)

The function in place of `rule` takes the result of `repeat_heads`, which holds the heads and their number of copies.
All later uses of the variable must be arguments of such a function.
"""

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tigon.recognition.rewriting.statements import REPEAT_HEADS, single_target
from tigon.runtime.device import PLAIN


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
