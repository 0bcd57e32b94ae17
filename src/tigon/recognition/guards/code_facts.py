"""Answer questions about the code that a forward reaches, which decide how many probes recognition needs."""

import builtins
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tigon.runtime.reach.code import code_facts
from tigon.runtime.reach.known_names import OF_PYTHON, WITHOUT_SIZES
from tigon.runtime.reach.places import Place, Reach, is_simple

MODES = frozenset(("training", "requires_grad", "is_grad_enabled", "set_grad_enabled", "is_inference"))


def has_conditions(reach: Reach) -> bool:
    """Return True if the code may compute one thing for one kind of input and another thing for another kind."""
    return bool(MODES & reach.names) or any(code_facts(code).has_conditions for code in reach.codes)


def explain_identity(reach: Reach) -> str | None:
    """Return why code that compares objects by `is` cannot be compared with an op, or None. `(n > 4) is True` is False
    for a symbol n, and leaves no guard in a run with symbolic sizes."""
    tests_identity = any(code_facts(code).tests_identity for code in reach.codes)
    return "decides by its input (it compares objects by `is`)" if tests_identity else None


def symbolic_modes(reach: Reach) -> tuple[bool, ...]:
    """Return the modes in which code must run with symbolic sizes: without and with gradients. Code without conditions
    computes the same for sizes that small probes do not have, unless it contains a number that is larger than these
    sizes or calls a builtin function such as `max`."""
    builtin_names = vars(builtins).keys() - {"float"}
    numbers = [*(c for code in reach.codes for c in code.co_consts), *(place.value for place in reach.places)]
    has_floats = any(type(number) is float for number in numbers)
    names_builtin = any(not builtin_names.isdisjoint(code.co_names) for code in reach.codes)
    if not (has_conditions(reach) or has_floats or names_builtin or largest_number(reach) > 3):
        return ()
    return (False, True)[: 1 + ("requires_grad" in reach.names)]


def reads_sizes_only_by_torch(reach: Reach, module: nn.Module) -> bool:
    """Return True if the names in the code show that it can learn a size only from a function of torch. A
    `TorchFunctionMode` sees each call of such a function, also those for an index, a loop or a comparison of a
    tensor."""
    imports = any(code_facts(code).imports for code in reach.codes)
    # Names of attributes, functions and tables of the model's author are harmless, because `explore` has read the code
    # of these functions too. A name that torch or Python also uses is not harmless, and neither is an attribute or an
    # entry of a table that holds a function or a class of torch or Python.
    if imports or not all(_is_harmless(place, reach) for place in reach.places):
        return False
    names_of_author = {code.co_name for code in reach.codes}
    names_of_author |= {place.name for place in reach.places if place.how == "item" and isinstance(place.value, dict)}
    for each in module.modules():
        names_of_author.update(vars(each), each._parameters, each._buffers, each._modules)
    names = _HARMLESS.union(name for name in names_of_author if not any(hasattr(owner, name) for owner in _OWNERS))
    return all(names.issuperset(code.co_names) for code in reach.codes)


_HARMLESS = WITHOUT_SIZES | OF_PYTHON
# Torch and Python define their names in these objects.
_OWNERS = torch.Tensor, torch, torch.nn.functional, builtins


def _is_harmless(place: Place, reach: Reach) -> bool:
    """Return True if a place holds data, code that `explore` has read, or what torch calls by a name in `_HARMLESS`."""
    value = place.value
    if is_simple(value) or isinstance(value, (Tensor, nn.Module, types.ModuleType, types.CodeType, dict)):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(is_simple, value))
    if isinstance(value, types.FunctionType) and value.__code__ in reach.codes:
        return True
    # The entries of a table of activations are classes, whose forwards `explore` has read.
    if isinstance(value, type) and issubclass(value, nn.Module):
        return True
    return place.name in _HARMLESS and any(getattr(owner, place.name, None) is value for owner in _OWNERS)


def largest_number(reach: Reach) -> int:
    """Return the largest integer that the code contains or that its settings hold."""
    numbers = [n for code in reach.codes for constant in code.co_consts for n in _integers(constant)]
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
