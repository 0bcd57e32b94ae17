"""Refusals that every op shares: each names the op, the rule and the value, before anything is written."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["choice", "floating", "ignore_index", "integer", "number", "same", "shape", "tensor"]

_FLOATING = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def tensor(op: str, **tensors: object) -> None:
    """Each value must be a tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")


def floating(op: str, **tensors: Tensor | None) -> None:
    """Each tensor, where given, must be fp32, bf16, fp16 or (computed by the reference) fp64."""
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            tensor(op, **{name: value})
        if value.dtype not in _FLOATING:
            raise TypeError(f"{op}: {name} must be a float32, bfloat16 or float16 tensor, got {value.dtype}")


def shape(op: str, name: str, value: Tensor, expected: Sequence[int]) -> None:
    """`value` must have exactly the shape `expected`."""
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{op}: {name} must have shape {tuple(expected)}, got {tuple(value.shape)}")


def same(op: str, attribute: str, **tensors: Tensor | None) -> None:
    """All tensors that are given must agree in `attribute`: dtype or device."""
    given = {name: getattr(value, attribute) for name, value in tensors.items() if value is not None}
    if len(set(given.values())) > 1:
        found = ", ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(f"{op}: {' and '.join(given)} must have the same {attribute}, got {found}")


def integer(op: str, **tensors: Tensor) -> None:
    """Each tensor must hold int64 (torch's dtype of class indices) or int32."""
    for name, value in tensors.items():
        tensor(op, **{name: value})
        if value.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: {name} must be an int64 or int32 tensor, got {value.dtype}")


def number(
    op: str, name: str, value: object, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> float:
    """`value` as a float; it must be a finite number in [low, high], or in (low, high] with `above`. No tensor: its
    gradient would be lost, and reading it would wait for the GPU.
    """
    if isinstance(value, (Tensor, bool)) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    # Not math.isfinite: `torch.compile` may have made a symbol of the number.
    inside = -math.inf < value < math.inf and (low < value if above else low <= value) and value <= high
    if not inside:
        if high < math.inf:
            rule = f"be in [{low:g}, {high:g}]"
        elif low == 0:
            rule = "be positive and finite" if above else "be finite and not negative"
        else:
            rule = "be finite"
        raise ValueError(f"{op}: {name} must {rule}, got {value}")
    return float(value)


def ignore_index(op: str, value: object) -> int:
    """`value` as the index of targets that do not count: an int of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: ignore_index must be an int, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{op}: ignore_index must fit into 64 bits, got {value}")
    return value


def choice(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
