"""Settings that the forward of an MLP may read, and a change of each."""

# The sources in the tables use all of these imports.
import collections  # noqa: F401
import dataclasses
import enum
import functools  # noqa: F401
import types
from collections.abc import Callable

import torch  # noqa: F401
import torch.nn.functional as F
from torch import Tensor, nn

from recognition import modules  # noqa: F401
from recognition.modules import MLP, define, variant

SCALE = 1.0


def activation(x: Tensor) -> Tensor:
    return F.silu(x)


ACTIVATION = activation


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    inner: types.SimpleNamespace = dataclasses.field(default_factory=lambda: types.SimpleNamespace(scale=1.0))


class CallableObject:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return F.silu(x) * self.scale


class Meta(type):
    @property
    def gain(cls):
        return SCALE


class Looks(type):
    def __getattr__(cls, name):
        return SCALE


class Gains:
    gain_of_class = 1.0


class Equal:
    limit = 1.0

    def __eq__(self, other):
        return other < self.limit

    __hash__ = object.__hash__


@dataclasses.dataclass
class Level:
    scale: float = 1.0

    def __str__(self) -> str:
        return f"scale {self.scale}"


TEXTS = {"scale 1.0": 1.0, "scale 2.0": 2.0}
GIVEN = types.SimpleNamespace(scale=1.0)


def gain_of_given() -> float:
    return getattr(GIVEN, "gain", 1.0)


def gelu(self: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(x)


def doubled(self: nn.Module, y: Tensor) -> Tensor:
    return 2 * y


def read_the_base(self: nn.Module, y: Tensor) -> Tensor:
    return super(type(self), self).finish(y)


MATCH = """
match self.config:
    case types.SimpleNamespace(scale=1.0):
        return F.silu(x)
return 2.0 * F.silu(x)
"""
CONFIG, SETTINGS, LEVEL = "m.config = types.SimpleNamespace(scale=1.0)", "m.config = Settings()", "m.level = Level()"
TO_2, SCALE_TO_2 = "m.config.scale = 2.0", "global SCALE; SCALE = 2.0"
PARTIAL = "m.function = functools.partial(F.gelu, approximate='{}')"
# Each row holds statements that prepare the MLP m, the factor by which its activation multiplies F.silu(x), and
# statements that change this factor.
FACTORS: dict[str, tuple[str, str, str]] = {
    "config": (CONFIG, "self.config.scale", TO_2),
    "another config": (SETTINGS, "self.config.scale", "m.config = Settings(2.0)"),
    "list": ("m.table = [1.0, 3.0]", "self.table[0]", "m.table.reverse()"),
    "dict": ("m.table = {'scale': 1.0}", "self.table['scale']", "m.table.update(scale=2.0)"),
    "nested dict": (
        "m.table = {'a': {'scale': [1.0]}}", "self.table['a']['scale'][0]", "m.table['a']['scale'].insert(0, 2.0)",
    ),
    "set": ("m.flags = {'plain'}", "(2.0 if 'double' in self.flags else 1.0)", "m.flags.add('double')"),
    "attribute that shadows the class": ("", "self.scale_of_class", "m.scale_of_class = 2.0"),
    "attribute of the class": ("", "self.scale_of_class", "type(m).scale_of_class = 2.0"),
    "property": ("m._scale = 1.0; type(m).scale = property(lambda self: self._scale)", "self.scale", "m._scale = 2.0"),
    "global": ("", "SCALE", SCALE_TO_2),
    "training of a config": (
        "m.config = types.SimpleNamespace(training=False)", "(2.0 if self.config.training else 1.0)",
        "m.config.training = True",
    ),
    "training of a child": (
        "m.drop = nn.Dropout(0.0)", "(1.0 if self.drop.training == self.training else 2.0)", "m.drop.eval()",
    ),
    "UserDict": ("m.table = collections.UserDict(scale=1.0)", "self.table['scale']", "m.table.update(scale=2.0)"),
    "ChainMap": (
        "m.table = collections.ChainMap({}, {'scale': 1.0})", "self.table['scale']",
        "m.table.maps[1].update(scale=2.0)",
    ),
    "comparison": ("m.small = Equal()", "(2.0 if self.small == 1.5 else 1.0)", "m.small.limit = 2.0"),
    "text": (f"{LEVEL}; m.table = dict(TEXTS)", "self.table[str(self.level)]", "m.level.scale = 2.0"),
    "formatted text": (f"{LEVEL}; m.table = dict(TEXTS)", "self.table[f'{self.level}']", "m.level.scale = 2.0"),
    "property of the metaclass": ("m.__class__ = Meta('Gains', (type(m),), {})", "type(self).gain", SCALE_TO_2),
    "lookup of the metaclass": ("m.__class__ = Looks('Gains', (type(m),), {})", "type(self).gain", SCALE_TO_2),
    "global that hides a builtin": ("", "max(1.0, 0.5)", "global max; max = lambda *numbers: 2.0"),
}  # fmt: skip
# Factors that look up an attribute by a name that may be missing or computed.
LOOKUPS: dict[str, tuple[str, str, str]] = {
    "getattr": ("m.scale = 1.0", "getattr(self, 'scale', 1.0)", "m.scale = 2.0"),
    "computed name": ("m.scale_1 = 1.0", "getattr(self, 'scale_' + str(1))", "m.scale_1 = 2.0"),
    "name in an attribute": ("m.chosen, m.scale_1 = 'scale_1', 1.0", "getattr(self, self.chosen)", "m.scale_1 = 2.0"),
    "computed name of the class": ("", "getattr(self, 'scale_of_' + str('class'))", "type(m).scale_of_class = 2.0"),
    "computed name of the class of a config": (
        "m.config = Gains()", "getattr(self.config, 'gain_of_' + str('class'))", "m.config.gain_of_class = 2.0",
    ),
    "fields of a dataclass": (SETTINGS, "dataclasses.asdict(self.config)['scale']", TO_2),
    "missing attribute of torch": ("", "getattr(torch, 'gain', 1.0)", "torch.gain = 2.0"),
    "attribute of torch": ("torch.gain = 1.0", "getattr(torch, 'gain', 3.0)", "torch.gain = 2.0"),
    "function in torch": ("torch.gain = lambda: SCALE", "getattr(torch, 'gain', None)()", SCALE_TO_2),
    "missing attribute of a Python module": ("", "getattr(modules, 'gain', 1.0)", "modules.gain = 2.0"),
    "missing attribute that a later function reads": ("", "GIVEN.scale * gain_of_given()", "GIVEN.gain = 2.0"),
}  # fmt: skip
# Each row holds statements that prepare the MLP m, the body of its activation, and statements that change the result.
BODIES: dict[str, tuple[str, str, str]] = {
    "function": ("m.function = activation", "return self.function(x)", "m.function = F.gelu"),
    "partial": (PARTIAL.format("none"), "return self.function(x)", PARTIAL.format("tanh")),
    "callable object": ("m.function = CallableObject()", "return self.function(x)", "m.function.scale = 2.0"),
    "config in a variable": (
        SETTINGS, "config = self.config; inner = config.inner; return F.silu(x) * inner.scale",
        "m.config.inner.scale = 2.0",
    ),
    "method of the instance": ("", "return F.silu(x)", "m.act = F.gelu"),
    "method of the class": ("", "return F.silu(x)", "type(m).finish = doubled"),
    "method of the base": ("type(m).finish = read_the_base", "return F.silu(x)", "MLP.finish = doubled"),
    "global function": ("", "return activation(x)", "global activation; activation = F.gelu"),
    "code of a function": ("", "return activation(x)", "ACTIVATION.__code__ = (lambda x: 2 * x).__code__"),
    "function of torch": ("", "return F.silu(x)", "F.silu = F.gelu"),
    "child": ("m.child = nn.SiLU()", "return self.child(x)", "m.child = nn.GELU()"),
    "forward of the child's class": (
        "m.child = type('Act', (nn.SiLU,), {'forward': lambda self, x: F.silu(x)})()", "return self.child(x)",
        "type(m.child).forward = gelu",
    ),
    "class": ("", "return F.silu(x)", "m.__class__ = variant('Other', act=gelu)"),
}  # fmt: skip


def with_factors(factors: dict[str, tuple[str, str, str]]) -> dict[str, tuple[str, str, str]]:
    return {name: (given, f"return F.silu(x) * {factor}", to) for name, (given, factor, to) in factors.items()}


BODIES |= with_factors(FACTORS)


def by_cell(mlp: MLP) -> Callable[[MLP], None]:
    scale = 1.0

    def change(m: MLP) -> None:
        nonlocal scale
        scale = 2.0

    type(mlp).act = lambda self, x: F.silu(x) * scale
    return change


def by_default(mlp: MLP) -> Callable[[MLP], None]:
    act = type(mlp).act = define("return F.silu(x) * scale", globals(), "self, x, scale=1.0")
    return lambda m: setattr(act, "__defaults__", (2.0,))


def by_value_of_a_member(mlp: MLP) -> Callable[[MLP], None]:
    member = enum.Enum("Gains", {"PLAIN": 1.0}).PLAIN
    type(mlp).act = lambda self, x: F.silu(x) * member.value
    return lambda m: setattr(member, "_value_", 2.0)


def by_sources(given: str, body: str, change: str) -> Callable[[MLP], Callable[[MLP], None]]:
    def add(mlp: MLP) -> Callable[[MLP], None]:
        define(given or "pass", globals(), "m")(mlp)
        type(mlp).act = define(body, globals())
        return define(change, globals(), "m")

    return add


# Each function gives an MLP of a class of its own an activation that reads a setting. It returns the change.
CHANGES = {name: by_sources(*sources) for name, sources in BODIES.items()}
LOOKED_UP = {
    name: by_sources(*sources) for name, sources in {**with_factors(LOOKUPS), "pattern": (CONFIG, MATCH, TO_2)}.items()
}
CHANGES |= {"cell": by_cell, "default": by_default, "value of a member": by_value_of_a_member}


def with_setting(name: str) -> tuple[MLP, Callable[[MLP], None]]:
    """Return an MLP that reads a setting, and the function that changes the setting."""
    mlp = MLP()
    mlp.__class__ = variant("Settings")
    return mlp, (CHANGES | LOOKED_UP)[name](mlp)


class Pickled(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.table = [1.0]

    def act(self, x):
        return activation(x) * self.table[0] * SCALE
