"""Functions, autograd functions and modules with Liger's parameters that call functions of the alias.

Parameters are text as in a definition, such as "x, weight, eps=1e-6, *, offset=0.0". The results are compiled from
source, so that a call costs no more than one that is written by hand. A parameter that a function lacks has no effect.
A function with `**options` gets all parameters, except those of `WITHOUT_EFFECT`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Options of Liger that choose among its kernels or chunks.
WITHOUT_EFFECT = {
    "backend", "ce_impl", "ce_mode", "chunk_mem_const", "chunk_size", "compiled", "eps", "impl", "in_place", "inplace",
    "jsd_impl", "jsd_mode", "m_tiles_per_cluster", "mode", "reduce", "row_mode", "size_average", "tiles_per_reduce",
}  # fmt: skip


def _names(parameters: str) -> list[str]:
    return list(inspect.signature(eval(f"lambda {parameters}: None")).parameters)


def _arguments(function: Callable[..., Any], values: dict[str, str], renamed: dict[str, str] | None) -> str:
    """Return the source of the arguments of a call of `function`, for the source of each value by its name."""
    parameters, names = inspect.signature(function).parameters, {v: k for k, v in (renamed or {}).items()}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    pairs = [(names.get(name, name), source) for name, source in values.items()]
    used = [pair for pair in pairs if pair[0] in parameters or (takes_all and pair[0] not in WITHOUT_EFFECT)]
    return ", ".join(f"{name}={source}" for name, source in used)


def serve(
    name: str, function: Callable[..., Any], parameters: str, renamed: dict[str, str] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function with these parameters that calls `function` with those that it has, by name.

    `renamed` has the name in `parameters` for each parameter of `function` that has another one there. The result of
    `function` passes through `finish`.

    >>> def power(base, exponent):
    ...     return base**exponent
    >>> serve("square", power, "x, exponent=2, impl=None", {"base": "x"})(3)
    9
    """
    arguments = _arguments(function, {key: key for key in _names(parameters)}, renamed)
    call = f"finish(function({arguments}))" if finish else f"function({arguments})"
    served: Callable[..., Any] = eval(f"lambda {parameters}: {call}", {"function": function, "finish": finish})
    served.__name__ = served.__qualname__ = name
    served.__doc__ = function.__doc__
    return served


def autograd_function(name: str, function: Callable[..., Any], **members: Any) -> type:
    """Return a class whose `apply` is the function. It has no backward, because Tigon's ops are differentiable."""
    return type(name, (), members | {"apply": staticmethod(function), "__doc__": function.__doc__})


def _extra_repr(self: Any) -> str:
    values = {name: getattr(self, name) for name in self.option_names}
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if not isinstance(value, Tensor))


def module(
    place: str, name: str, function: Callable[..., Any], constructor: str, tensors: str,
    renamed: dict[str, str] | None = None, check: Callable[[Any], None] | None = None,
) -> Any:  # fmt: skip
    """Return a class of modules that stores its options as attributes and calls `function` in its forward.
    `constructor` has the parameters of the constructor, which are the options, and `tensors` those of the forward.
    `renamed` is as in `serve`, and `check` refuses wrong options of a new module. `place` is the Python module to which
    the class belongs, for pickle."""
    option_names = _names(constructor)

    def initialise(self: Any, values: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        for option, value in values.items():
            setattr(self, option, value)
        if check is not None:
            check(self)

    sources = {option: f"self.{option}" for option in option_names} | {key: key for key in _names(tensors)}
    values = ", ".join(f"{option}={option}" for option in option_names)
    scope = {"function": function, "initialise": initialise}
    members = {
        "__init__": eval(f"lambda self, {constructor}: initialise(self, dict({values}))", scope),
        "forward": eval(f"lambda self, {tensors}: function({_arguments(function, sources, renamed)})", scope),
    }
    for member, value in members.items():
        value.__name__, value.__qualname__ = member, f"{name}.{member}"
    return type(name, (nn.Module,), members | {
        "extra_repr": _extra_repr, "option_names": option_names, "__doc__": function.__doc__, "__module__": place,
    })  # fmt: skip
