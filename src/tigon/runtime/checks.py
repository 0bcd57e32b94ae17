"""Checks of arguments for all ops. Each error names the op, the rule and the value, before anything is written."""

import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

_FLOATING = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_MAX_CHARACTERS = 80


def format_value(value: object) -> str:
    """Return `value` as one short line for a message. Reading the elements of a tensor would wait for the GPU."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    # Python refuses to print an int of more than 4300 digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def tensor(op: str, **tensors: object) -> None:
    """Check that each value is a tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")


def floating(op: str, **tensors: Tensor | None) -> None:
    """Check that each value is None or an fp32, bf16 or fp16 tensor (or fp64, which only the references compute)."""
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            tensor(op, **{name: value})
        if value.dtype not in _FLOATING:
            raise TypeError(f"{op}: {name} must be a float32, bfloat16 or float16 tensor, got {value.dtype}")


def shape(op: str, name: str, value: Tensor, expected: Sequence[int]) -> None:
    """Check that `value` has exactly the shape `expected`."""
    if value.shape != expected and tuple(value.shape) != tuple(expected):
        raise ValueError(f"{op}: {name} must have shape {tuple(expected)}, got {tuple(value.shape)}")


def same(op: str, attribute: str, **tensors: Tensor | None) -> None:
    """Check that all tensors that are not None agree in `attribute`: dtype or device."""
    values = {name: getattr(value, attribute) for name, value in tensors.items() if value is not None}
    first = next(iter(values.values()), None)
    for value in values.values():
        if value != first:
            shown_values = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"{op}: {' and '.join(values)} must have the same {attribute}, got {shown_values}")


def integer(op: str, **tensors: Tensor) -> None:
    """Check that each value is a tensor of int64 (torch's dtype of class indices) or int32."""
    for name, value in tensors.items():
        tensor(op, **{name: value})
        if value.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: {name} must be an int64 or int32 tensor, got {value.dtype}")


def boolean(op: str, **tensors: object) -> None:
    """Check that each value is a tensor of bool."""
    for name, value in tensors.items():
        tensor(op, **{name: value})
        if value.dtype != torch.bool:  # type: ignore[attr-defined]
            raise TypeError(f"{op}: {name} must be a bool tensor, got {value.dtype}")  # type: ignore[attr-defined]


def flag(op: str, **flags: object) -> None:
    """Check that each value is a bool. Other values are refused, because the string "no" would count as true."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise TypeError(f"{op}: {name} must be a bool, got {format_value(value)}")


def number(
    op: str, name: str, value: object, low: float = -math.inf, high: float = math.inf, *, excludes_low: bool = False
) -> float:
    """Return `value` as a float; check that it is finite and in [low, high], or (low, high] with `excludes_low`, in
    fp32 too. A tensor is refused: its gradient would be lost, and reading it would wait for the GPU."""
    if isinstance(value, (Tensor, bool)) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    # The comparison replaces `math.isfinite`, which does not accept the symbols that `torch.compile` uses for numbers.
    is_in_range = -_LARGEST <= value <= _LARGEST and (low + _SMALLEST if excludes_low else low) <= value <= high
    if not is_in_range:
        finite = "finite in float32" if -math.inf < value < math.inf and abs(value) > _LARGEST else "finite"
        if high < math.inf:
            rule = f"be in [{low:g}, {high:g}]"
        elif low == 0:
            rule = f"be positive and {finite}" if excludes_low else f"be {finite} and not negative"
        else:
            rule = f"be {finite}"
        raise ValueError(f"{op}: {name} must {rule}, got {format_value(value)}")
    return float(value)


def size(op: str, name: str, value: object) -> int:
    """Return `value`, a number of features; check that it is a positive int of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {format_value(value)}")
    if not 0 < value < 2**63:
        raise ValueError(f"{op}: {name} must be positive and fit into 64 bits, got {format_value(value)}")
    return value


def _factory(op: str, options: dict[str, Any]) -> None:
    """Check the options `device` and `dtype` of a module's parameters."""
    for name in options:
        choice(op, "an option", name, ("device", "dtype"))
    floating_dtype(op, "dtype", options.get("dtype"))
    try:
        torch.empty(0, device=options.get("device"))
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as error:
        raise ValueError(f"{op}: device must be one that torch has, got {format_value(options['device'])}") from error


def norm_module(op: str, normalized_shape: object, factory: dict[str, Any], **flags: object) -> None:
    """Check the arguments of a norm's constructor: N or a shape of one dimension, flags, `device` and `dtype`."""
    if isinstance(normalized_shape, (tuple, list)):
        if len(normalized_shape) != 1:
            raise ValueError(f"{op}: normalized_shape must have one dimension, got {format_value(normalized_shape)}")
        (normalized_shape,) = normalized_shape
    size(op, "normalized_shape", normalized_shape)
    flag(op, **flags)
    _factory(op, factory)


def mlp_module(op: str, hidden_size: object, intermediate_size: object, bias: object, factory: dict[str, Any]) -> None:
    """Check the arguments of an MLP's constructor."""
    size(op, "hidden_size", hidden_size)
    size(op, "intermediate_size", intermediate_size)
    flag(op, bias=bias)
    _factory(op, factory)


def products(op: str, x: Tensor, **weights: Tensor) -> None:
    """Check that `x` and its weights are on one device and, without autocast, of one dtype."""
    same(op, "device", x=x, **weights)
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        same(op, "dtype", x=x, **weights)


def features(op: str, x: Any, count: int) -> None:
    """Check that `x` is a tensor [..., count]."""
    tensor(op, x=x)
    if x.shape[-1:] != (count,):
        raise ValueError(f"{op}: the last dimension of x must have size {count}, got shape {tuple(x.shape)}")


def floating_dtype(op: str, name: str, value: object) -> None:
    """Check that `value` is None or a dtype in which the ops compute."""
    if value is not None and not (isinstance(value, torch.dtype) and value in _FLOATING):
        raise TypeError(
            f"{op}: {name} must be a floating-point dtype (float32, bfloat16 or float16), got {format_value(value)}"
        )


def ignore_index(op: str, value: object) -> int:
    """Return `value`, the index of ignored targets; check that it is an int of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: ignore_index must be an int, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{op}: ignore_index must fit into 64 bits, got {format_value(value)}")
    return value


def choice(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Check that `value` is one of `choices` with the type of that choice, as True equals 1. A tensor is refused."""
    if type(value) is str and value in choices:
        return
    if not isinstance(value, (str, int, torch.dtype, NoneType)) or isinstance(value, bool) or value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {format_value(value)}")
