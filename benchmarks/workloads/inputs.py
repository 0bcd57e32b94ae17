"""Tensors for the ops, whose values are distributed as in training.

The values come from a private generator: the global random state is neither read nor advanced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The logits of a trained model are N(0, SPREAD^2) over the vocabulary, and the logit of the right token is far above
# them, by a random amount. On average it equals the log-sum-exp of the other logits, so the losses are between about 0
# and several nats.
SPREAD = 2.0


@dataclass
class Inputs:
    """The arguments of one forward pass, and the gradients that its backward pass starts from. `tensors` are the op's
    tensor arguments by name, in the order of its signature; those that require a gradient get one. `upstream` has a
    gradient for each output. It is empty if the first output is a scalar loss."""

    tensors: dict[str, Tensor]
    upstream: tuple[Tensor, ...] = ()

    @property
    def grad_names(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.tensors.items() if tensor.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.grad_names)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """Return the inputs with `change(name, tensor)` for each tensor; upstream gradients are named "upstream"."""
        tensors = {
            name: change(name, tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in self.tensors.items()
        }
        return Inputs(tensors, tuple(change("upstream", gradient) for gradient in self.upstream))

    def fingerprints(self) -> dict[str, int]:
        """Return a checksum of each tensor, which shows whether a call has overwritten it and costs no memory. The
        checksum is the sum of the tensor's storage, read as 16-bit integers."""
        bits = lambda x: torch.empty(0, dtype=torch.int16, device=x.device).set_(x.untyped_storage())
        total = lambda x: int(bits(x).sum(dtype=torch.int64))
        return {name: total(x) for name, x in self.tensors.items()} | {
            f"upstream {i}": total(x) for i, x in enumerate(self.upstream)
        }


@dataclass(frozen=True)
class InputMaker:
    """Draws the tensors of an op for given sizes, dtype and device. `options` are the op's keyword arguments, on which
    the inputs may depend. `form` says what the inputs look like beyond sizes and options: `ignored` is the share of the
    targets that are -100, and each function that makes inputs documents its own keys. Without a generator all tensors
    are zeros, because the compiler reads no values."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None
    options: Mapping[str, Any]
    form: Mapping[str, Any]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if self.generator is None:
            return torch.zeros(*shape, dtype=dtype, device=self.device)
        return torch.randn(*shape, dtype=dtype, device=self.device, generator=self.generator)

    def scale(self, n: int) -> Tensor:
        """Draw the weight of a norm, [n]: with the offset it is near one, as in a trained model."""
        return self.normal(n).mul_(0.1).add_(1 - float(self.options.get("offset", 0.0)))

    def targets(self, t: int, v: int) -> Tensor:
        """Draw the classes of t tokens; the ignored ones are at random positions."""
        if self.generator is None:
            return torch.zeros(t, dtype=torch.int64, device=self.device)
        targets = torch.randint(0, v, (t,), device=self.device, generator=self.generator)
        targets[: round(self.form.get("ignored", 0.0) * t)] = -100
        return targets[torch.randperm(t, device=self.device, generator=self.generator)]

    def target_logits(self, t: int, v: int) -> Tensor:
        """Draw the logits of the right tokens, [T] fp32."""
        return math.log(v) + SPREAD**2 / 2 + 3.0 * self.normal(t, dtype=torch.float32)

    def logits(self, t: int, v: int, targets: Tensor) -> Tensor:
        """Draw the logits of a trained model, [T, V]."""
        logits = self.normal(t, v).mul_(SPREAD)
        peak = self.target_logits(t, v).to(logits.dtype)
        return logits.scatter_(1, targets.clamp(min=0)[:, None], peak[:, None])


def rows(make: InputMaker) -> Inputs:
    """Make the input of an op of one tensor: sizes are its shape."""
    x, upstream = make.normal(*make.sizes), make.normal(*make.sizes)
    return Inputs({"x": x.requires_grad_()}, (upstream,))
