"""Follow the stack through the bytecode of one function: which instructions compute a value, which call receives it.

For `act(x * 2)`, `call_arguments` returns the instructions of the argument: LOAD_FAST x, LOAD_CONST 2, BINARY_OP *.

Where these functions cannot follow a value, they return an empty list or None. The caller must then assume that any
instruction may have computed the value.
"""

import dis
import types
from typing import Any

# The first instruction of a call, which removes the arguments from the stack.
FIRST_OF_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
# Instructions after which the next one does not run.
JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"))
ENDS = JUMPS | {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
# Instructions that load a variable begin with one of these names.
VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME")


def line_of(step: dis.Instruction) -> int | None:
    """Return the line of an instruction."""
    positions = getattr(step, "positions", None)
    return positions.lineno if positions is not None else None


def is_jump(step: dis.Instruction) -> bool:
    """Return True if an instruction is a jump, conditional or not."""
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def is_load(step: dis.Instruction, *names: str) -> bool:
    """Return True if an instruction loads an attribute or a global with one of these names."""
    return step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME") and step.argval in names


def is_variable(step: dis.Instruction) -> bool:
    """Return True if an instruction loads variables of the function."""
    return step.opname.startswith(VARIABLES)


def names_of(step: dis.Instruction) -> tuple[str, ...]:
    """Return the variables that an instruction loads or stores; some instructions handle two at once."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _stack_effect(step: dis.Instruction) -> int:
    """Return the number of values that an instruction adds to the stack if it does not jump."""
    return dis.stack_effect(step.opcode, step.arg, jump=False)


def find_operand(steps: list[dis.Instruction], end: int) -> list[dis.Instruction]:
    """Return the instructions that compute the value on top of the stack before instruction `end`.

    The list holds the instructions of both values for `a if c else b`. It is empty if the value may come from an
    earlier iteration of a loop, or if an instruction exchanges values on the stack. If the value is a copy of one that
    is also stored, as in `n = m = x` and in `(n := x)`, the list holds the instructions that compute the original.
    """
    return _follow(steps, end)[0]


def _follow(steps: list[dis.Instruction], end: int, last: int | None = None) -> tuple[list[dis.Instruction], int]:
    """Return what `find_operand` returns, and the index of the first of these instructions.

    The search goes backwards from `end`, and counts how many values the instructions add to the stack. It ends at a
    load from which on they add one value, because these instructions compute that value. If several instructions may
    run directly before `end`, `last` selects one of them.
    """
    total, index = 0, end
    operand: list[dis.Instruction] = []
    while True:
        predecessors = [last] if last is not None and not operand else _predecessors(steps, index)
        # Two branches, which compute `a` and `b` of `a if c else b`, meet here.
        if len(predecessors) > 1 and all(is_jump(step) for step in operand):
            return _follow_all(steps, index, predecessors), 0
        # Here the function begins, or branches meet within the expression.
        if len(predecessors) != 1:
            return [], 0
        index = predecessors[0]
        step = steps[index]
        if step.opname == "SWAP" or (step.opname == "COPY" and step.arg != 1):
            return [], 0
        total += _stack_effect(step)
        operand.insert(0, step)
        if total == 1 and step.opname == "COPY":
            # This instruction copies the value below it on the stack, so the search goes on for that value.
            total = 0
        elif total == 1 and step.opname.startswith("LOAD_"):
            return operand, index


def _follow_all(steps: list[dis.Instruction], end: int, predecessors: list[int]) -> list[dis.Instruction]:
    """Return the instructions of `a` and of `b` for `a if c else b`; the list is empty if one was not found.

    `predecessors` are the last instructions of the two branches.
    """
    # A value from the last iteration of a loop, or one that `a or b` tests, is not followed.
    if any(steps[i].opname.startswith("JUMP_BACKWARD") or "IF" in steps[i].opname for i in predecessors):
        return []
    parts = [_follow(steps, end, i)[0] for i in predecessors]
    return [step for part in parts for step in part] if all(parts) else []


def _predecessors(steps: list[dis.Instruction], index: int) -> list[int]:
    """Return the indices of the instructions that may run directly before another one."""
    predecessors = [index - 1] if index > 0 and steps[index - 1].opname not in ENDS else []
    if index < len(steps) and steps[index].is_jump_target:
        target = steps[index].offset
        predecessors += [i for i, step in enumerate(steps) if is_jump(step) and step.argval == target]
    return predecessors


def _find_call(steps: list[dis.Instruction], number: int) -> int | None:
    """Return the index of the call of the function that instruction `number` loads.

    The depth of the stack above the function shows which call belongs to it. After a jump the result is None.
    """
    depth = 0
    for i in range(number + 1, len(steps)):
        step = steps[i]
        if step.opname == "PUSH_NULL" and i == number + 1:
            continue
        if step.opname == FIRST_OF_CALL and depth == step.arg:
            return i
        depth += _stack_effect(step)
        if is_jump(step) or depth < 0:
            return None
    return None


def call_arguments(steps: list[dis.Instruction], number: int) -> list[list[dis.Instruction]] | None:
    """Return the instructions of each argument in the call of the function that instruction `number` loads."""
    if (end := _find_call(steps, number)) is None:
        return None
    arguments: list[list[dis.Instruction]] = []
    for _ in range(steps[end].arg or 0):
        # The names of keyword arguments are no value.
        while end > 0 and steps[end - 1].opname == "KW_NAMES":
            end -= 1
        operand, start = _follow(steps, end)
        if not operand:
            return None
        arguments.insert(0, operand)
        end = start
    return arguments


def is_call_with_constant(steps: list[dis.Instruction], number: int) -> bool:
    """Return True if the function that this instruction loads is called with a constant as its second argument."""
    arguments = call_arguments(steps, number) or []
    return len(arguments) >= 2 and [step.opname for step in arguments[1]] == ["LOAD_CONST"]


def enters_block(steps: list[dis.Instruction], number: int) -> bool:
    """Return True for `with cls(...)`, where instruction `number` loads the class."""
    end = _find_call(steps, number)
    if end is None:
        return False
    after = next((s.opname for s in steps[end + 1 :] if s.opname not in ("CALL", "CACHE", "COPY")), "")
    return after in ("BEFORE_WITH", "LOAD_SPECIAL")


def handlers(code: types.CodeType) -> list[tuple[int, int, int]]:
    """Return (start, end, handler) in bytes for each range of a code object whose exceptions a handler receives."""
    # The stubs of `dis` do not declare this attribute.
    entries: Any = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return [(entry.start, entry.end, entry.target) for entry in entries]
