"""Match the norms of queries and keys and the rotary embedding that follows them, and delay the norms until it.

    q = self.q_norm(a).transpose(1, 2)     |   q, n = start_norm(rope, self.q_norm, a)
                                           |   q = q.transpose(1, 2)
    cos, sin = tables                      |   cos, sin = tables
    q, k = rope(q, k, cos, sin)            |   q, k = norm_rope(rope, (n, m), (True, True), q, k, cos, sin)

`start_norm` returns `norm(a)` and None unless one op can compute the norm together with the rotary embedding, and
otherwise `a` and the norm, which `norm_rope` then computes. The third argument says which tensors were exchanged, so
that `norm_rope` can run a norm on the tensor that the stock statement passes to it. Norms and rotary embedding may be
in branches. Only assignments that leave the normalised tensor alone are allowed between them.
"""

import ast
from types import FunctionType
from typing import Any, NamedTuple

from tigon.recognition.rewriting.statements import NORM_ROPE, START_NORM, call_of_child, parse_statements, single_target

# Expressions that assign a variable or leave the function.
UNSUPPORTED = ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom


def _uses(node: ast.AST, name: str) -> bool:
    """Return True if a node reads or writes the variable."""
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _transposed(value: ast.expr) -> ast.expr | None:
    """Return x if an expression is `x.transpose(1, 2)`."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    x = value.func.value
    return x if ast.unparse(value) == f"{ast.unparse(x)}.transpose(1, 2)" else None


def _is_harmless(statement: ast.stmt) -> bool:
    """Return True if a statement assigns to variables only, and calls no method whose name means a write in place."""
    if isinstance(statement, ast.If):
        has_plain_test = not any(isinstance(node, UNSUPPORTED) for node in ast.walk(statement.test))
        return has_plain_test and all(map(_is_harmless, [*statement.body, *statement.orelse]))
    if not isinstance(statement, ast.Assign):
        return False
    for node in ast.walk(statement):
        if isinstance(node, UNSUPPORTED) or (isinstance(node, ast.Attribute) and node.attr.endswith("_")):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            return False
        if isinstance(node, ast.keyword) and node.arg in ("out", "inplace"):
            return False
    return True


class _RopeCall(NamedTuple):
    """The statement `targets = function(*targets, ...)`, where the function rotates the targets."""

    function: str
    targets: list[str]
    call: ast.Call


def _match_rope(statement: ast.stmt, scope: dict[str, Any]) -> _RopeCall | None:
    """Return the rotary embedding that a statement computes. `scope` holds the globals of the forward."""
    if not (
        isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Call)
    ):
        return None
    call, target = statement.value, statement.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [each.id for each in targets if isinstance(each, ast.Name)]
    if not isinstance(call.func, ast.Name) or len(names) != len(targets) or len({*names}) != len(names):
        return None
    function = scope.get(call.func.id)
    if not isinstance(function, FunctionType) or len(names) > 2:
        return None
    code = function.__code__
    if not {"cos", "sin"} <= {*code.co_varnames[: code.co_argcount]}:
        return None
    first, others = call.args[: len(names)], [*call.args[len(names) :], *call.keywords]
    rotates_targets = [each.id for each in first if isinstance(each, ast.Name)] == names
    is_plain = not any(isinstance(node, (*UNSUPPORTED, ast.Starred)) for node in ast.walk(call))
    if not rotates_targets or not is_plain or any(_uses(other, name) for other in others for name in names):
        return None
    return _RopeCall(call.func.id, names, call)


class _Norm(NamedTuple):
    """The statement that normalises a tensor which a later statement rotates."""

    # The block that contains the statement, and its position there.
    block: list[ast.stmt]
    position: int
    # The statement of the outer block that contains this block, or the norm itself.
    outer: ast.stmt
    call: ast.Call
    is_transposed_here: bool
    # True if dimensions 1 and 2 are exchanged between the norm and the rotary embedding.
    is_transposed: bool


def _find_norm(block: list[ast.stmt], end: int, name: str, outer: ast.stmt | None = None) -> _Norm | None:
    """Return the norm of the variable `name` that the statements before `end` compute."""
    transposed = False
    for index in range(end - 1, -1, -1):
        statement = block[index]
        if not _uses(statement, name):
            if not _is_harmless(statement):
                return None
            continue
        if isinstance(statement, ast.If):
            if outer is not None or statement.orelse or _uses(statement.test, name) or not _is_harmless(statement):
                return None
            norm = _find_norm(statement.body, len(statement.body), name, statement)
            return norm and norm._replace(is_transposed=norm.is_transposed != transposed)
        if single_target(statement) != name or not _is_harmless(statement):
            return None
        assert isinstance(statement, ast.Assign), "the statement has a target"
        inner = _transposed(statement.value)
        if isinstance(inner, ast.Name) and inner.id == name:
            transposed = not transposed
            continue
        call = call_of_child(statement.value if inner is None else inner)
        if call is None:
            return None
        is_here = inner is not None
        return _Norm(block, index, outer or statement, call, is_here, transposed != is_here)
    return None


def fuse_head_norms(
    block: list[ast.stmt], scope: dict[str, Any], number: int
) -> tuple[list[ast.stmt], list[str]] | None:
    """Replace the first norms with a rotary embedding in a block. Return the block and the norms' names, or None.
    `number` makes the names of the new variables unique."""
    for position, statement in enumerate(block):
        branch = statement if isinstance(statement, ast.If) and not statement.orelse else None
        for inner_position, inner in enumerate(branch.body if branch else [statement]):
            if (rope := _match_rope(inner, scope)) is None:
                continue
            if branch and not all(map(_is_harmless, branch.body[:inner_position])):
                continue
            if branch and any(_uses(s, t) for s in (branch.test, *branch.body[:inner_position]) for t in rope.targets):
                continue
            norms = [_find_norm(block, position, target) for target in rope.targets]
            found_norms = [norm for norm in norms if norm is not None]
            if len(found_norms) == len(norms):
                children = [norm.call.func.attr for norm in found_norms if isinstance(norm.call.func, ast.Attribute)]
                new_block = _rewrite(block, branch, inner, rope, found_norms, number)
                return new_block, children
    return None


def _rewrite(
    block: list[ast.stmt],
    branch: ast.If | None,
    rope_statement: ast.stmt,
    rope: _RopeCall,
    norms: list[_Norm],
    number: int,
) -> list[ast.stmt]:
    """Return the block with the norms and the rotary embedding replaced. `branch` contains the latter, or is None."""
    variables = [f"_tigon_norm_{number}_{i}_" for i in range(len(norms))]
    replacements: dict[ast.stmt, list[ast.stmt]] = {}
    for norm, variable, target in zip(norms, variables, rope.targets, strict=True):
        statement = norm.block[norm.position]
        arguments = ", ".join([rope.function, ast.unparse(norm.call.func), ast.unparse(norm.call.args[0])])
        text = f"{target}, {variable} = {START_NORM}({arguments})"
        text += f"\n{target} = {target}.transpose(1, 2)" * norm.is_transposed_here
        replacements[statement] = parse_statements(text, statement)
    targets = ", ".join(rope.targets)
    states = f"({', '.join(variables)},), {tuple(norm.is_transposed for norm in norms)}"
    arguments = ", ".join(map(ast.unparse, [*rope.call.args, *rope.call.keywords]))
    text = f"{targets} = {NORM_ROPE}({rope.function}, {states}, {arguments})"
    replacements[rope_statement] = parse_statements(text, rope_statement)
    if branch is not None:
        # Without the rotary embedding, the norms alone are left to compute.
        branch.orelse = parse_statements(f"{targets} = {NORM_ROPE}(None, {states}, {targets})", branch)
        branch.body = [new for each in branch.body for new in replacements.get(each, [each])]
    result: list[ast.stmt] = []
    for each in block:
        for norm, variable in zip(norms, variables, strict=True):
            if norm.outer is each and isinstance(each, ast.If):
                # The branch may be skipped, and the tensor then has no norm.
                result += parse_statements(f"{variable} = None", each)
        if isinstance(each, ast.If) and each is not branch:
            each.body = [new for inner in each.body for new in replacements.get(inner, [inner])]
        result += replacements.get(each, [each])
    return result
