"""Find the conditions of a function that depend on its arguments in a way that the probes of recognition do not cover.

A variable is *dependent* if it is an argument other than `self`, or if its value is computed from a dependent variable.
A condition on a dependent variable is a *decision*, except a condition on its dtype, its type or its number of
dimensions, or on whether it is None, because the probes of recognition cover these. Where the instructions do not show
what a condition reads, it counts as a decision. In

    def forward(self, x, mask=None):
        n = x.shape[0]
        if n > 512: ...
        if x.dtype == self.dtype: ...
        if mask is not None: ...

only the first condition is a decision, because `n` depends on `x`.
"""

import dis
import itertools
import types
from typing import NamedTuple

from tigon.runtime.state.instructions import (
    ENDS,
    call_arguments,
    find_operand,
    handlers,
    is_jump,
    is_load,
    is_variable,
    line_of,
    names_of,
)
from tigon.runtime.state.known_names import PROBED, PROBED_FUNCTIONS
from tigon.runtime.weak_cache import cached_weakly

# Instructions that build the message of an exception begin with one of these names.
MESSAGE_STEPS = (
    "LOAD_",
    "PUSH_NULL",
    "FORMAT_",
    "BUILD_",
    "CONVERT_",
    "PRECALL",
    "CALL",
    "BINARY_",
    "KW_NAMES",
    "CACHE",
)


class FunctionInputs(NamedTuple):
    """The arguments with which a function is called.

    If `positional_count` is a number, the caller passes that many positional arguments after `self`. The last
    `default_count` arguments have defaults. An argument that is not passed has its default, so it is a setting and not
    an input. If `self_holds_inputs` is True, `self` is constructed from the inputs.
    """

    positional_count: int | None = None
    default_count: int = 0
    self_holds_inputs: bool = False


ANY_INPUTS = FunctionInputs()


def _arguments(code: types.CodeType, inputs: FunctionInputs) -> set[str]:
    """Return the arguments of a function that hold inputs, or values computed from inputs."""
    positional_count, default_count, self_holds_inputs = inputs
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)]
    is_method = arguments[:1] == ("self",)
    if positional_count is not None:
        required_count = code.co_argcount - default_count
        arguments = arguments[: max(required_count, positional_count + 1)] if is_method else arguments
    return {*arguments} - ({"self"} if is_method and not self_holds_inputs else set())


def _reads_only_width(steps: list[dis.Instruction], index: int) -> bool:
    """Return True if a variable is loaded only to read its last size, as `x.shape[-1]` or `x.size(-1)`."""
    following = [s for s in steps[index + 1 : index + 5] if s.opname != "CACHE"]
    if len(following) < 3 or (following[1].opname, following[1].argval) != ("LOAD_CONST", -1):
        return False
    if is_load(following[0], "size"):
        return following[2].opname in ("PRECALL", "CALL") and following[2].arg == 1
    is_item = following[2].opname == "BINARY_SUBSCR" or following[2].argrepr == "[]"
    return is_load(following[0], "shape") and is_item


def _without_probed_calls(expression: list[dis.Instruction]) -> list[dis.Instruction]:
    """Return an expression without the first argument of a call of `isinstance`, `type` or another probed function.

    The expression stays as it is if an argument of the call contains another call.
    """
    for i, step in enumerate(expression):
        if step.opname == "LOAD_GLOBAL" and step.argval in PROBED_FUNCTIONS:
            arguments = call_arguments(expression, i)
            if arguments and all(len(a) == 1 or not any(s.opname == "CALL" for s in a) for a in arguments):
                first = arguments[0]
                return [s for s in expression if not any(s is loaded for loaded in first)]
    return expression


def _is_test_for_none(expression: list[dis.Instruction], arguments: set[str]) -> bool:
    """Return True for `argument is None` and `argument is not None`."""
    return (
        len(expression) == 3
        and is_variable(expression[0])
        and expression[0].argval in arguments
        and expression[1].opname == "LOAD_CONST"
        and expression[1].argval is None
        and expression[2].opname == "IS_OP"
    )


def _depends(
    expression: list[dis.Instruction], dependent: set[str], arguments: set[str], ignores_width: bool = False
) -> bool:
    """Return True if an expression depends on a variable in `dependent` in a way that the probes do not cover.

    The probes cover a test of one of `arguments` for None. If `ignores_width` is True, reading only the last size of a
    variable does not count. An expression whose instructions were not found counts as dependent.
    """
    # An instruction CHECK_EXC_MATCH or CHECK_EG_MATCH tests an exception, which may depend on anything.
    if not expression or any(step.opname.startswith("CHECK_E") for step in expression):
        return True
    if _is_test_for_none(expression, arguments):
        return False
    expression = _without_probed_calls(expression)
    for i, (step, following) in enumerate(itertools.zip_longest(expression, expression[1:])):
        if is_variable(step) and dependent & {*names_of(step)}:
            is_probed = following is not None and is_load(following, *PROBED)
            if not is_probed and not (ignores_width and _reads_only_width(expression, i)):
                return True
        # A function that is defined here may use any variable of the function around it.
        is_function = step.opname == "LOAD_CONST" and isinstance(step.argval, types.CodeType)
        if is_function and dependent & {*step.argval.co_freevars}:
            return True
    return False


def dependent_variables(
    code: types.CodeType,
    steps: list[dis.Instruction],
    inherited: frozenset[str] = frozenset(),
    inputs: FunctionInputs = ANY_INPUTS,
    ignores_width: bool = False,
) -> set[str]:
    """Return the variables that hold an input or a value computed from one.

    `inherited` holds such variables of the function around this one.
    """
    arguments = _arguments(code, inputs)
    dependent = arguments | (inherited & {*code.co_freevars})
    stores = [i for i, step in enumerate(steps) if step.opname.startswith(("STORE_FAST", "STORE_DEREF"))]
    operands = [(names_of(steps[i]), find_operand(steps, i)) for i in stores]
    while True:
        new_names = {
            name
            for names, expression in operands
            if not dependent.issuperset(names) and _depends(expression, dependent, arguments, ignores_width)
            for name in names
        }
        if new_names <= dependent:
            return dependent
        dependent |= new_names


# --- conditions that only raise ----------------------------------------------------------------------


def _raises(steps: list[dis.Instruction], index: int) -> bool:
    """Return True if the instructions from `index` on raise an exception before they do anything else."""
    for step in steps[index:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if not step.opname.startswith(MESSAGE_STEPS):
            return False
    return False


def _is_check(steps: list[dis.Instruction], index: int, protected_ranges: list[tuple[int, int, int]]) -> bool:
    """Return True if one side of a condition only raises an exception that this function does not catch."""
    if any(start <= steps[index].offset < end for start, end, _ in protected_ranges):
        return False
    target = next((i for i, step in enumerate(steps) if step.offset == steps[index].argval), len(steps))
    return any(_raises(steps, side) or _leads_to_check(steps, side, index) for side in (index + 1, target))


def _leads_to_check(steps: list[dis.Instruction], side: int, index: int) -> bool:
    """Return True for the first condition in `if a and b: raise`.

    Both conditions jump to the same instruction, and the second condition raises if it does not jump.
    """
    for i, step in enumerate(steps[side:], side):
        if is_jump(step):
            is_condition = "IF" in step.opname and step.argval == steps[index].argval
            return is_condition and _raises(steps, i + 1)
        if step.opname in ENDS or step.opname.startswith("STORE_"):
            return False
    return False


# --- decisions -------------------------------------------------------------------------------------


@cached_weakly
def find_decisions(code: types.CodeType, inputs: FunctionInputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lines of the decisions of a function, and of the checks in it.

    A check is a condition on the last size of an argument that only raises an exception, as in

        if x.shape[-1] != self.width:
            raise ValueError("wrong width")

    It is no decision if no code catches the exception, and if other code raises as well for an input of another width.
    """
    lines: list[int] = []
    checks: list[int] = []
    pending: list[tuple[types.CodeType, frozenset[str], FunctionInputs]] = [(code, frozenset(), inputs)]
    for current_code, inherited, current_inputs in pending:
        steps = list(dis.get_instructions(current_code))
        dependent = dependent_variables(current_code, steps, inherited, current_inputs)
        # Variables that depend on more than the last size of an argument.
        beyond_width = dependent_variables(current_code, steps, inherited, current_inputs, ignores_width=True)
        arguments, protected_ranges = _arguments(current_code, current_inputs), handlers(current_code)
        line = current_code.co_firstlineno
        for i, step in enumerate(steps):
            line = line_of(step) or line
            if not is_condition(steps, i):
                continue
            expression = find_operand(steps, i)
            # Arguments to which no earlier instruction assigns another value.
            unchanged = arguments - {name for s in steps[:i] if s.opname.startswith("STORE_") for name in names_of(s)}
            if "NONE" in step.opname and len(expression) == 1 and expression[0].argval in unchanged:
                continue
            if _depends(expression, dependent, unchanged):
                is_width = not _depends(expression, beyond_width, unchanged, ignores_width=True)
                (checks if is_width and _is_check(steps, i, protected_ranges) else lines).append(line)
        inner = frozenset(dependent)
        pending += [(c, inner, FunctionInputs()) for c in current_code.co_consts if isinstance(c, types.CodeType)]
    return tuple(lines), tuple(checks)


def is_condition(steps: list[dis.Instruction], index: int) -> bool:
    """Return True for a jump on a condition, except for the jump with which a `with` block ends."""
    name = steps[index].opname
    ends_block = any(s.opname == "WITH_EXCEPT_START" for s in steps[max(index - 2, 0) : index])
    return "JUMP" in name and "IF" in name and not ends_block
