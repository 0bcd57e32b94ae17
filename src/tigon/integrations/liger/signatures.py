"""Functions with Liger's parameters that call functions of the alias."""

import inspect
from collections.abc import Callable
from typing import Any


def serve(
    name: str, function: Callable[..., Any], parameters: str, renamed: dict[str, str] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function with these parameters that calls `function` with those that it has, by name.

    The result is compiled from source, so that a call costs no more than one that is written by hand.

    Args:
        name: The name of the result, which has the docstring of `function`.
        function: The function that computes the result. Parameters that it lacks have no effect.
        parameters: The parameters as in a definition, such as "x, weight, eps=1e-6, *, offset=0.0".
        renamed: The name in `parameters` for each parameter of `function` that has another one there.
        finish: A function that the result passes through.

    Example:
        >>> def power(base, exponent):
        ...     return base**exponent
        >>> serve("square", power, "x, exponent=2, impl=None", {"base": "x"})(3)
        9
    """
    accepted = inspect.signature(eval(f"lambda {parameters}: None")).parameters
    names = {key: (renamed or {}).get(key, key) for key in inspect.signature(function).parameters}
    arguments = ", ".join(f"{key}={source}" for key, source in names.items() if source in accepted)
    call = f"finish(function({arguments}))" if finish else f"function({arguments})"
    served: Callable[..., Any] = eval(f"lambda {parameters}: {call}", {"function": function, "finish": finish})
    served.__name__ = served.__qualname__ = name
    served.__doc__ = function.__doc__
    return served
