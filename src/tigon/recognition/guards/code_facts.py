"""Answer questions about the code that a forward reaches, which decide how many probes recognition needs."""

import builtins
import dis
import inspect
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tigon.runtime.state.decisions import is_condition
from tigon.runtime.state.known_names import WITHOUT_SIZES
from tigon.runtime.state.places import Reach
from tigon.runtime.weak_cache import cached_weakly

# Instructions that may reveal the size of a tensor contain one of these words.
SIZE_INSTRUCTIONS = ("SUBSCR", "SLICE", "UNPACK", "ITER", "COMPARE", "CONTAINS", "CALL_FUNCTION_EX", "MATCH", "IMPORT")
# Instructions that compute a condition.
CONDITIONS = ("COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT")
# Names of modes that the probes change.
MODES = frozenset(("training", "requires_grad", "is_grad_enabled", "set_grad_enabled", "is_inference"))


def codes_of(reach: Reach) -> list[types.CodeType]:
    """Return the code of every function that `explore` has read, and of the functions that they define."""
    codes = [place.value for place in reach.places if isinstance(place.value, types.CodeType)]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return codes


def has_conditions(reach: Reach) -> bool:
    """Return True if the code may compute one thing for one kind of input and another thing for another kind."""
    return bool(MODES & reach.names) or any(map(_has_condition, codes_of(reach)))


def may_see_sizes(reach: Reach, module: nn.Module) -> bool:
    """Return True unless the names in the code show that it cannot learn the size of a tensor.

    If the result is False, the forward needs no run with symbolic sizes. Names of attributes and functions of the
    model's author are harmless, because `explore` has read the code of these functions too. A name that torch or Python
    also uses is not harmless.
    """
    codes = codes_of(reach)
    names_of_author = {code.co_name for code in codes}
    for each in module.modules():
        names_of_author.update(vars(each), each._parameters, each._buffers, each._modules)
    harmless = WITHOUT_SIZES | {name for name in names_of_author if not _is_of_torch(name)}
    return not all(_names(code) <= harmless for code in codes)


def _is_of_torch(name: str) -> bool:
    """Return True if torch or Python defines this name."""
    return any(hasattr(owner, name) for owner in (torch.Tensor, torch, torch.nn.functional, builtins))


@cached_weakly
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names that a code object loads, and its instructions that may reveal the size of a tensor."""
    operations = {instruction.opname for instruction in dis.get_instructions(code)}
    size_operations = {name for name in operations if any(part in name for part in SIZE_INSTRUCTIONS)}
    nested = {"<nested>"} if any(isinstance(constant, types.CodeType) for constant in code.co_consts) else set()
    return frozenset(code.co_names) | size_operations | nested


@cached_weakly
def _has_condition(code: types.CodeType) -> bool:
    """Return True if a code object computes a condition or jumps on one."""
    instructions = list(dis.get_instructions(code))
    return any(each.opname in CONDITIONS or is_condition(instructions, i) for i, each in enumerate(instructions))


def assigns_attributes(function: Callable) -> bool:
    """Return True if the code of a function, without its wrappers, assigns attributes or globals, as a counter does."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = () if code is None else (instruction.opname for instruction in dis.get_instructions(code))
    return any(name in ("STORE_ATTR", "STORE_GLOBAL") for name in names)


def largest_number(reach: Reach) -> int:
    """Return the largest integer that the code contains or that its settings hold."""
    numbers = [n for code in codes_of(reach) for constant in code.co_consts for n in _integers(constant)]
    numbers += [n for place in reach.places for n in _integers(place.value)]
    return max(numbers, default=0)


def _integers(value: object) -> Iterator[int]:
    """Yield the integers in a number, a slice or a tuple."""
    if type(value) is int:
        yield value
    elif type(value) is slice:
        yield from (n for n in (value.start, value.stop, value.step) if type(n) is int)
    elif type(value) is tuple:
        for each in value:
            yield from _integers(each)
