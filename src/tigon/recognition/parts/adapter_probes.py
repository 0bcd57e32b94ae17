"""Find out whether the forward of a class of PEFT is that of a linear layer with low-rank adapters.

A small copy of a layer runs in several states and dtypes, once for each class. Its outputs must be those of the
projection that its attributes describe, and it may read no other attribute of its layer.
"""

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.adapters.lora import eager_output
from tigon.ops.adapters.projection import Projection
from tigon.recognition.parts.comparison import CANNOT_RUN
from tigon.recognition.probing.standin import (
    BF16,
    FP32,
    describe,
    gradients,
    normal,
    probing,
    random_linear,
    same_bits,
    same_gradients,
)
from tigon.recognition.probing.trials import record
from tigon.runtime.stock import written_in
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

DIFFERENT = "computes something else than a linear layer with low-rank adapters"

# The attributes of a layer of PEFT that its forward reads. `_active_adapter`, `merged_adapters` and `_disable_adapters`
# are behind the properties `active_adapters`, `merged` and `disable_adapters`.
CHILDREN = "base_layer", "lora_A", "lora_B", "lora_dropout"
SETTINGS = "scaling", "lora_variant", "_active_adapter", "merged_adapters", "_disable_adapters"
OPTIONAL_SETTINGS = ("cast_input_dtype_enabled",)

NAME = "low-rank adapters"

SMALL_INPUT, SMALL_OUTPUT, SMALL_RANK = 24, 40, 3

# A function that reads the projection of a layer for an input; None if the layer has to be called.
Read = Callable[[Any, Tensor], Any]


class ForwardCode(NamedTuple):
    """The code of the forward of a class, and that of the methods and properties that it reads."""

    methods: frozenset[str]
    read: Callable[[type], Any]
    value: Any
    # Why layers that run this code keep their forward; None if it computes the sum.
    reason: str | None = None

    def is_that_of_class(self, cls: type) -> bool:
        """Return whether a class still has this code."""
        try:
            return self.read(cls) == self.value
        except AttributeError:
            return False

    def is_that_of(self, layer: nn.Module) -> bool:
        """Return whether a layer still runs this code."""
        return self.is_that_of_class(type(layer)) and layer.__dict__.keys().isdisjoint(self.methods)


@cached_weakly
def _known_codes(cls: type) -> list[ForwardCode]:
    """Return the list that holds the code of a class, once its forward has been compared."""
    return []


# A comparison changes settings of the process, such as the default dtype, and restores them.
_LOCK = threading.RLock()


def code_of(cls: type, read: Read) -> ForwardCode:
    """Return the code of the forward of a class of PEFT. Its `reason` says whether a layer keeps its forward."""
    with _LOCK:
        known_codes = _known_codes(cls)
        if not known_codes or not known_codes[0].is_that_of_class(cls):
            known_codes[:] = [_learn(cls, read)]
        return known_codes[0]


def _learn(cls: Any, read: Read) -> ForwardCode:
    """Compare the forward of a class with the products that the attributes of a layer describe."""
    code = ForwardCode(frozenset(), attrgetter("forward.__code__"), getattr(cls.forward, "__code__", None))
    if not written_in(cls.forward).startswith("peft."):
        return code._replace(reason=f"{DIFFERENT}: its forward is not that of PEFT")
    try:
        with probing():
            names = _observe(_small_copy(cls, FP32, FP32))
            members = {name: inspect.getattr_static(cls, name, None) for name in names}
            static = {name: each for name, each in members.items() if isinstance(each, (FunctionType, property))}
            methods = {name for name, function in static.items() if isinstance(function, FunctionType)} - {"forward"}
            properties = sorted(static.keys() - methods - {"forward"})
            paths = [f"{name}.__code__" for name in ("forward", *sorted(methods))]
            read_code = attrgetter(*paths, *(f"{name}.fget.__code__" for name in properties))
            code = ForwardCode(frozenset(methods), read_code, read_code(cls))
            if unknown := sorted(names - {*static, *CHILDREN, *SETTINGS, *OPTIONAL_SETTINGS}):
                return code._replace(reason=f"{DIFFERENT}: its forward reads or assigns {', '.join(unknown)}")
            return code if _agrees(cls, read) else code._replace(reason=DIFFERENT)
    except Exception as error:
        LOGGER.debug("%s cannot be run as a layer with adapters", cls.__name__, exc_info=True)
        return code._replace(reason=f"{CANNOT_RUN} ({describe(error)})")


def _observe(twin: Any) -> set[str]:
    """Return the names of the attributes of its layer that a forward reads or assigns, without those of any module."""
    names: set[str] = set()

    def read(self: Any, name: str) -> Any:
        names.add(name)
        return object.__getattribute__(self, name)

    def assign(self: Any, name: str, value: Any) -> None:
        names.add(name)
        object.__setattr__(self, name, value)

    cls = type(twin)
    twin.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__setattr__": assign})
    # A small copy has only the attributes that a layer is known to read.
    with contextlib.suppress(AttributeError):
        cls.forward(twin, normal(5, 2, SMALL_INPUT))
    return names - {*dir(nn.Module()), "__class__"}


STATES: tuple[dict[str, Any], ...] = (
    {"_active_adapter": "first"},
    {"_active_adapter": ["second"]},
    {"_active_adapter": ["second", "first", "third"], "scaling": {"first": -3.0, "second": 0.5}},
)


def _small_copy(cls: type, base_dtype: torch.dtype, adapter_dtype: torch.dtype, **state: Any) -> Any:
    """Return a small layer of a class of PEFT with random tensors and the adapters `first` and `second`."""
    ranks = {"first": SMALL_RANK, "second": SMALL_RANK + 1}
    dicts: dict[str, dict[str, nn.Module]] = {
        "lora_A": {n: random_linear(r, SMALL_INPUT, r, adapter_dtype, bias=False) for n, r in ranks.items()},
        "lora_B": {n: random_linear(9 + r, r, SMALL_OUTPUT, adapter_dtype, r > SMALL_RANK) for n, r in ranks.items()},
        "lora_dropout": {"first": nn.Identity(), "second": nn.Dropout(0.5)},
    }
    children: dict[str, nn.Module | None] = {name: nn.ModuleDict(modules) for name, modules in dicts.items()}
    children["base_layer"] = random_linear(7, SMALL_INPUT, SMALL_OUTPUT, base_dtype)
    settings: dict[str, Any] = {"scaling": {"first": 0.75, "second": 1.5}, "lora_variant": {}, "merged_adapters": []}
    settings |= {"_active_adapter": ["first"], "_disable_adapters": False}
    twin: Any = object.__new__(cls)
    nn.Module.__init__(twin)
    twin._modules.update(children)
    vars(twin).update(settings | state)
    return twin


def _agrees(cls: Any, read: Read) -> bool:
    """Return whether the outputs and gradients of small copies are those of the projections that `read` returns."""
    for base_dtype, adapter_dtype in ((FP32, FP32), (BF16, BF16), (BF16, FP32)):
        for state in STATES:
            twin = _small_copy(cls, base_dtype, adapter_dtype, **state)
            x = normal(5, 2, 3, SMALL_INPUT, dtype=base_dtype)
            projection = read(twin, x)
            if not isinstance(projection, Projection):
                return False
            run = functools.partial(_seeded, functools.partial(cls.forward, twin), x)
            compute = functools.partial(_seeded, functools.partial(eager_output, projection=projection), x)
            expected, actual = run(), compute()
            # PEFT's layers with a quantised base round the output of an fp32 adapter before they add it.
            if base_dtype == adapter_dtype:
                is_same = same_bits(expected, actual)
            else:
                is_near = lambda a, b: bool((a - b).abs().max() <= 2**-7 * b.abs().max())
                is_same = actual.dtype == expected.dtype and is_near(actual, expected)
            if not record(is_same, NAME, twin, [x], actual, expected):
                return False
            if adapter_dtype == base_dtype == FP32:
                leaves = [x, *twin.parameters()]
                expected, actual = gradients(run, leaves), gradients(compute, leaves)
                if not record(same_gradients(actual, expected), NAME, twin, [x], actual, expected, mode="gradients"):
                    return False
    return True


def _seeded(forward: Callable, x: Tensor) -> Any:
    """Return forward(x), in which each dropout draws the same mask at every call."""
    torch.default_generator.manual_seed(0)
    return forward(x)
