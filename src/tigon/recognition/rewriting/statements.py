"""Match statements of a forward, and write others in their place."""

import ast
from typing import NamedTuple

# The names by which the rewritten source calls the functions. No forward uses such names.
REPEAT_HEADS, LOG_DECAY = "_tigon_repeat_heads_", "_tigon_log_decay_"
ADD_NORM, NORM_WITH_RESIDUAL, PRODUCTS, START_NORM, NORM_ROPE = NAMES = (
    "_tigon_add_norm_",
    "_tigon_norm_with_residual_",
    "_tigon_products_",
    "_tigon_start_norm_",
    "_tigon_norm_rope_",
)


def parse_statements(text: str, place: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a text. Tracebacks show the line of `place` for them."""
    statements = ast.parse(text).body
    for statement in statements:
        for node in ast.walk(statement):
            ast.copy_location(node, place)
    return statements


class ChildCall(NamedTuple):
    """The names in a call `self.child(argument)`."""

    child: str
    argument: str


def child_call(node: ast.AST) -> ChildCall | None:
    """Return the names of the child and the argument of a call `self.child(argument)`; None for any other node."""
    call = call_of_child(node)
    if call is None or not isinstance(call.func, ast.Attribute) or not isinstance(call.args[0], ast.Name):
        return None
    return ChildCall(call.func.attr, call.args[0].id)


def call_of_child(node: ast.AST) -> ast.Call | None:
    """Return the node if it is `self.child(expression)`."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
        return None
    function = node.func
    is_child = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return node if is_child and function.value.id == "self" else None  # type: ignore[attr-defined]


def single_target(statement: ast.stmt) -> str | None:
    """Return the variable if a statement is `variable = value`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None
