"""The frame of an op: the node of autograd that runs its kernels.

An op's file holds the formulas, a reference in torch (`NAME_reference`, for tests and for devices without Triton),
launchers (`tigon.runtime.launch.launcher`), whose `_empty_` functions allocate what they return, and a node:

    class _Scale(Node):
        def forward(ctx, x, factor):
            ctx.factor = factor
            return scale_forward(x, factor)

        def backward(ctx, dy):
            return (scale_backward(dy, ctx.factor),)

A function that `tigon.memory.lean.recomputed_by_call` decorates chooses between `_Scale.apply` and the reference by
`tigon.runtime.device.runs_kernels`, and the public function checks the arguments by `tigon.runtime.checks`.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from tigon.runtime.autograd import without_autocast
from tigon.runtime.compat.autograd import apply_without_transforms, is_any_autocast_enabled, transforms_are_active

# In the types of torch, `forward` and `backward` are static methods, to which this class turns plain functions.
_Function: Any = torch.autograd.Function


class Node(_Function):
    """The base class of the autograd functions of ops. It has no second derivative. `backward` returns the gradients of
    the first inputs, as a tuple. This class replaces those that are not needed by None, so a launcher may return an
    empty tensor for them, and it adds None for the other inputs, such as options. Autocast is off while `backward`
    runs, and `create_graph=True` is refused: torch's `once_differentiable` raises only if the upstream gradient itself
    needs a gradient, so a penalty on the gradient of a plain loss would silently be a constant."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run the forward, and record the node if an input needs a gradient."""
        return super().apply(*args) if transforms_are_active() else cls._apply(*args)

    # `apply` for calls outside of the transforms of `torch.func`.
    _apply: ClassVar[Callable]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._apply = staticmethod(apply_without_transforms(cls))
        if "forward" in vars(cls):
            cls.forward = staticmethod(cls.forward)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_framed(cls.__name__.strip("_"), cls.backward))


def _framed(name: str, backward: Callable) -> Callable:
    """Return the backward of an autograd function for the backward of a `Node` with this name."""
    run_without_autocast = without_autocast(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(f"tigon: {name} has no second derivative, so it refuses create_graph=True")
        # The condition saves one call, because small models wait for the host. The compiler does not trace it.
        is_plain = not torch.compiler.is_dynamo_compiling() and not is_any_autocast_enabled()
        gradients = backward(ctx, *upstream) if is_plain else run_without_autocast(ctx, *upstream)
        needs = ctx.needs_input_grad
        count = len(gradients)
        if not all(needs[:count]):
            gradients = tuple([x if needed else None for x, needed in zip(gradients, needs, strict=False)])
        return gradients + (None,) * (len(needs) - count)

    return call
