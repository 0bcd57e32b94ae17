"""Settings that the forward of an MLP may read. Each function adds one to an MLP.

It returns an activation that reads the setting, and a function that changes the setting.
"""

import collections
import dataclasses
import enum
import functools
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recognition import modules
from recognition.modules import MLP, variant

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


def by_function(mlp):
    mlp.function = activation
    return lambda self, x: self.function(x), lambda m: setattr(m, "function", F.gelu)


def by_partial(mlp):
    mlp.function = functools.partial(F.gelu, approximate="none")
    return lambda self, x: self.function(x), lambda m: setattr(
        m, "function", functools.partial(F.gelu, approximate="tanh")
    )


def by_callable_object(mlp):
    mlp.function = CallableObject()
    return lambda self, x: self.function(x), lambda m: setattr(m.function, "scale", 2.0)


def by_config(mlp):
    mlp.config = types.SimpleNamespace(scale=1.0)
    return lambda self, x: F.silu(x) * self.config.scale, lambda m: setattr(m.config, "scale", 2.0)


def by_config_in_a_variable(mlp):
    mlp.config = Settings()

    def act(self, x):
        config = self.config
        inner = config.inner
        return F.silu(x) * inner.scale

    return act, lambda m: setattr(m.config.inner, "scale", 2.0)


def by_another_config(mlp):
    mlp.config = Settings()
    return lambda self, x: F.silu(x) * self.config.scale, lambda m: setattr(m, "config", Settings(2.0))


def by_getattr(mlp):
    mlp.scale = 1.0
    return lambda self, x: F.silu(x) * getattr(self, "scale", 1.0), lambda m: setattr(m, "scale", 2.0)


def by_list(mlp):
    mlp.table = [1.0, 3.0]
    return lambda self, x: F.silu(x) * self.table[0], lambda m: m.table.reverse()


def by_dict(mlp):
    mlp.table = {"scale": 1.0}
    return lambda self, x: F.silu(x) * self.table["scale"], lambda m: m.table.update(scale=2.0)


def by_nested_dict(mlp):
    mlp.table = {"a": {"scale": [1.0]}}
    return lambda self, x: F.silu(x) * self.table["a"]["scale"][0], lambda m: m.table["a"]["scale"].insert(0, 2.0)


def by_set(mlp):
    mlp.flags = {"plain"}
    return lambda self, x: F.silu(x) * (2.0 if "double" in self.flags else 1.0), lambda m: m.flags.add("double")


def by_attribute_that_shadows_the_class(mlp):
    return lambda self, x: F.silu(x) * self.scale_of_class, lambda m: setattr(m, "scale_of_class", 2.0)


def by_attribute_of_the_class(mlp):
    return lambda self, x: F.silu(x) * self.scale_of_class, lambda m: setattr(type(m), "scale_of_class", 2.0)


def by_method_of_the_instance(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(m, "act", F.gelu)


def by_method_of_the_class(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(type(m), "finish", lambda self, y: 2 * y)


def by_method_of_the_base(mlp):
    def finish(self, y):
        return super(type(self), self).finish(y)

    mlp.__class__.finish = finish
    return lambda self, x: F.silu(x), lambda m: setattr(MLP, "finish", lambda self, y: 2 * y)


def by_property(mlp):
    mlp._scale = 1.0
    mlp.__class__.scale = property(lambda self: self._scale)
    return lambda self, x: F.silu(x) * self.scale, lambda m: setattr(m, "_scale", 2.0)


class Meta(type):
    @property
    def gain(cls):
        return SCALE


def by_property_of_the_metaclass(mlp):
    mlp.__class__ = Meta("Gains", (type(mlp),), {})
    return lambda self, x: F.silu(x) * type(self).gain, lambda m: globals().update(SCALE=2.0)


def by_lookup_of_the_metaclass(mlp):
    meta = type("Looks", (type,), {"__getattr__": lambda cls, name: SCALE})
    mlp.__class__ = meta("Gains", (type(mlp),), {})
    return lambda self, x: F.silu(x) * type(self).gain, lambda m: globals().update(SCALE=2.0)


def by_global(mlp):
    return lambda self, x: F.silu(x) * SCALE, lambda m: globals().update(SCALE=2.0)


def by_global_function(mlp):
    return lambda self, x: activation(x), lambda m: globals().update(activation=F.gelu)


def by_code_of_a_function(mlp):
    return lambda self, x: activation(x), lambda m: setattr(ACTIVATION, "__code__", (lambda x: 2 * x).__code__)


def by_function_of_torch(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(F, "silu", F.gelu)


def by_cell(mlp):
    scale = 1.0

    def change(m):
        nonlocal scale
        scale = 2.0

    return lambda self, x: F.silu(x) * scale, change


def by_default(mlp):
    def act(self, x, scale=1.0):
        return F.silu(x) * scale

    return act, lambda m: setattr(act, "__defaults__", (2.0,))


def by_child(mlp):
    mlp.child = nn.SiLU()
    return lambda self, x: self.child(x), lambda m: setattr(m, "child", nn.GELU())


def by_forward_of_the_childs_class(mlp):
    mlp.child = type("Act", (nn.SiLU,), {"forward": lambda self, x: F.silu(x)})()
    return lambda self, x: self.child(x), lambda m: setattr(type(m.child), "forward", lambda self, x: F.gelu(x))


def by_computed_name(mlp):
    mlp.scale_1 = 1.0
    return lambda self, x: F.silu(x) * getattr(self, "scale_" + str(1)), lambda m: setattr(m, "scale_1", 2.0)


def by_name_in_an_attribute(mlp):
    mlp.chosen, mlp.scale_1 = "scale_1", 1.0
    return lambda self, x: F.silu(x) * getattr(self, self.chosen), lambda m: setattr(m, "scale_1", 2.0)


def by_computed_name_of_the_class(mlp):
    name = "scale_of_" + mlp.__class__.__name__[:0]
    return lambda self, x: F.silu(x) * getattr(self, name + "class"), lambda m: setattr(type(m), "scale_of_class", 2.0)


class Gains:
    gain_of_class = 1.0


def by_computed_name_of_the_class_of_a_config(mlp):
    mlp.config = Gains()
    act = lambda self, x: F.silu(x) * getattr(self.config, "gain_of_" + "class")
    return act, lambda m: setattr(m.config, "gain_of_class", 2.0)


def by_training_of_a_config(mlp):
    mlp.config = types.SimpleNamespace(training=False)
    return lambda self, x: F.silu(x) * (2.0 if self.config.training else 1.0), lambda m: setattr(
        m.config, "training", True
    )


def by_training_of_a_child(mlp):
    mlp.drop = nn.Dropout(0.0)
    act = lambda self, x: F.silu(x) * (1.0 if self.drop.training == self.training else 2.0)
    return act, lambda m: m.drop.eval()


def by_fields_of_a_dataclass(mlp):
    mlp.config = Settings()
    act = lambda self, x: F.silu(x) * dataclasses.asdict(self.config)["scale"]
    return act, lambda m: setattr(m.config, "scale", 2.0)


def by_pattern(mlp):
    mlp.config = types.SimpleNamespace(scale=1.0)

    def act(self, x):
        match self.config:
            case types.SimpleNamespace(scale=1.0):
                return F.silu(x)
        return 2.0 * F.silu(x)

    return act, lambda m: setattr(m.config, "scale", 2.0)


def by_user_dict(mlp):
    mlp.table = collections.UserDict(scale=1.0)
    return lambda self, x: F.silu(x) * self.table["scale"], lambda m: m.table.update(scale=2.0)


def by_chain_map(mlp):
    mlp.table = collections.ChainMap({}, {"scale": 1.0})
    return lambda self, x: F.silu(x) * self.table["scale"], lambda m: m.table.maps[1].update(scale=2.0)


class Equal:
    limit = 1.0

    def __eq__(self, other):
        return other < self.limit

    __hash__ = object.__hash__


def by_comparison(mlp):
    mlp.small = Equal()
    return lambda self, x: F.silu(x) * (2.0 if self.small == 1.5 else 1.0), lambda m: setattr(m.small, "limit", 2.0)


@dataclasses.dataclass(order=True)
class Level:
    scale: float = 1.0

    def __str__(self) -> str:
        return f"scale {self.scale}"


LOW, MIDDLE = Level(), Level(1.5)


def by_equality_of_fields(mlp):
    mlp.level = Level()
    return lambda self, x: F.silu(x) * (1.0 if self.level == LOW else 2.0), lambda m: setattr(m.level, "scale", 2.0)


def by_order_of_fields(mlp):
    mlp.level = Level()
    return lambda self, x: F.silu(x) * (2.0 if self.level > MIDDLE else 1.0), lambda m: setattr(m.level, "scale", 2.0)


def by_text(mlp):
    mlp.level, mlp.table = Level(), {"scale 1.0": 1.0, "scale 2.0": 2.0}
    return lambda self, x: F.silu(x) * self.table[str(self.level)], lambda m: setattr(m.level, "scale", 2.0)


def by_formatted_text(mlp):
    mlp.level, mlp.table = Level(), {"scale 1.0": 1.0, "scale 2.0": 2.0}
    return lambda self, x: F.silu(x) * self.table[f"{self.level}"], lambda m: setattr(m.level, "scale", 2.0)


def by_class(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(m, "__class__", variant("Other", act=lambda self, x: F.gelu(x)))


def by_global_that_hides_a_builtin(mlp):
    return lambda self, x: F.silu(x) * max(1.0, 0.5), lambda m: globals().update(max=lambda *numbers: 2.0)


def by_missing_attribute_of_torch(mlp):
    return lambda self, x: F.silu(x) * getattr(torch, "gain", 1.0), lambda m: setattr(torch, "gain", 2.0)


def by_attribute_of_torch(mlp):
    torch.gain = 1.0
    return lambda self, x: F.silu(x) * getattr(torch, "gain", 3.0), lambda m: setattr(torch, "gain", 2.0)


def by_function_in_torch(mlp):
    torch.gain = lambda: SCALE
    return lambda self, x: F.silu(x) * getattr(torch, "gain", None)(), lambda m: globals().update(SCALE=2.0)


def by_missing_attribute_of_a_python_module(mlp):
    return lambda self, x: F.silu(x) * getattr(modules, "gain", 1.0), lambda m: setattr(modules, "gain", 2.0)


GIVEN = types.SimpleNamespace(scale=1.0)


def gain_of_given() -> float:
    return getattr(GIVEN, "gain", 1.0)


def by_missing_attribute_that_a_later_function_reads(mlp):
    """The search visits the object before it reads the function that names the attribute."""
    return lambda self, x: F.silu(x) * GIVEN.scale * gain_of_given(), lambda m: setattr(GIVEN, "gain", 2.0)


def by_value_of_a_member(mlp):
    member = enum.Enum("Gains", {"PLAIN": 1.0}).PLAIN
    return lambda self, x: F.silu(x) * member.value, lambda m: setattr(member, "_value_", 2.0)


CHANGES = [
    *(by_function, by_partial, by_callable_object, by_config, by_config_in_a_variable, by_another_config, by_getattr),
    *(
        by_list,
        by_dict,
        by_nested_dict,
        by_set,
        by_attribute_that_shadows_the_class,
        by_attribute_of_the_class,
        by_property,
    ),
    *(by_method_of_the_instance, by_method_of_the_class, by_method_of_the_base, by_global, by_global_function),
    *(by_code_of_a_function, by_function_of_torch, by_cell, by_default, by_child, by_forward_of_the_childs_class),
    *(by_computed_name_of_the_class, by_computed_name_of_the_class_of_a_config, by_training_of_a_config),
    *(by_training_of_a_child, by_fields_of_a_dataclass, by_pattern),
    *(by_computed_name, by_name_in_an_attribute, by_user_dict, by_chain_map, by_comparison, by_class),
    *(by_equality_of_fields, by_order_of_fields, by_text, by_formatted_text),
    *(by_property_of_the_metaclass, by_lookup_of_the_metaclass, by_global_that_hides_a_builtin),
    *(
        by_missing_attribute_of_torch,
        by_attribute_of_torch,
        by_function_in_torch,
        by_missing_attribute_of_a_python_module,
    ),
    *(by_missing_attribute_that_a_later_function_reads, by_value_of_a_member),
]


class Pickled(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.table = [1.0]

    def act(self, x):
        return activation(x) * self.table[0] * SCALE
