"""Weights that exist in FP8 only, because the ranks of a sharded model have gathered them in this format.

    shard of a rank     q_r = round(w_r * (448 / amax))        amax is that of the whole matrix, over all ranks
    gathered weight     q = [q_0; q_1; ...]                    the same bits as round(w * (448 / amax))

With one scale for the whole matrix, the value of an element depends on this element and on the scale only. So the
copy by rows is the gathered data itself, and the transposed copy moves the same bytes to other places. Nothing is
rounded a second time.

Weights that multiply the same input share a scale (`tigon.ops.fp8.weights`): amax is then that of all of them.

Shapes: O outputs, H inputs of a layer.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.fp8.formats import LARGEST, WEIGHT_DTYPE, Factor, pad, runs_fp8_kernels
from tigon.ops.fp8.quantisation import Layout, quantise_parts
from tigon.runtime.maxima import Maxima
from tigon.runtime.torch_private.autograd import DisableTorchFunctionSubclass
from tigon.runtime.torch_private.operators import is_in_place, make_wrapper


class _Contents:
    """The FP8 values of a gathered weight. FSDP2 frees and fills their memory again and again."""

    def __init__(self, values: Tensor, scale: Tensor, group: Hashable) -> None:
        # [O, H] e4m3, in the memory that the all-gather writes.
        self.values = values
        # [1] fp32, which belongs to the last all-gather.
        self.scale = scale
        # Weights with equal groups were rounded with the same scale.
        self.group = group


class GatheredWeight(Tensor):
    """A weight [O, H] that looks like one in `dtype`, and has its values in FP8 with one scale.

    The FP8 ops read `factor`. For any other operation of torch, the weight is the tensor `scale * values` in `dtype`,
    which is computed for each such operation. The weight cannot be written.
    """

    contents: _Contents

    @staticmethod
    def __new__(cls, contents: _Contents, dtype: torch.dtype) -> "GatheredWeight":
        weight = make_wrapper(cls, contents.values.shape, dtype=dtype, device=contents.values.device)
        weight.contents = contents
        return weight

    @staticmethod
    def make(values: Tensor, scale: Tensor, group: Hashable, dtype: torch.dtype) -> "GatheredWeight":
        """Return a weight with the values [O, H] in e4m3 and the scale [1]."""
        return GatheredWeight(_Contents(values, scale, group), dtype)

    @property
    def factor(self) -> Factor:
        """Return the values and the scale, as a factor of a product."""
        return Factor(self.contents.values, self.contents.scale)

    @property
    def group(self) -> Hashable:
        """Return the value that all weights with the same scale have in common."""
        return self.contents.group

    def dequantise(self) -> Tensor:
        """Return the rounded weight as a plain tensor."""
        return (self.contents.values.float() * self.contents.scale).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        """Return the names of the tensors in this one. A tensor with this method has no memory of its own."""
        return ["fp8_values", "fp8_scale"], (self.contents.group, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], rest: tuple, size: Any, stride: Any) -> "GatheredWeight":
        group, dtype = rest
        return GatheredWeight.make(inner["fp8_values"], inner["fp8_scale"], group, dtype)

    @property
    def fp8_values(self) -> Tensor:
        return self.contents.values

    @property
    def fp8_scale(self) -> Tensor:
        return self.contents.scale

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Results are plain tensors. The default would give them this class.
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, GatheredWeight) and _is_alias(operator, weight, args[1:]):
            return GatheredWeight(weight.contents, weight.dtype)
        if is_in_place(operator):
            raise RuntimeError(
                f"tigon.gather_in_fp8: {operator} would write to a weight that is gathered in FP8; write to the "
                "sharded parameter, or call restore() of the report of tigon.gather_in_fp8"
            )
        return operator(*map(_dequantise_in, args), **{name: _dequantise_in(value) for name, value in kwargs.items()})


_ALIASES = torch.ops.aten.detach.default, torch.ops.aten.alias.default


def _is_alias(operator: Any, weight: GatheredWeight, rest: tuple) -> bool:
    """Return whether an operator returns the weight itself, as FSDP2 and `nn.Parameter` request it."""
    if operator is torch.ops.aten.as_strided.default:
        size, stride, *offset = rest
        return tuple(size) == weight.shape and tuple(stride) == weight.stride() and not any(offset)
    return operator in _ALIASES


def _dequantise_in(value: Any) -> Any:
    """Return an argument of an operator with plain tensors in place of gathered weights."""
    if isinstance(value, GatheredWeight):
        return value.dequantise()
    return type(value)(map(_dequantise_in, value)) if type(value) in (list, tuple) else value


def share_scale(weights: Sequence[Tensor]) -> bool:
    """Return whether weights can be factors of one product: none is gathered in FP8, or all with the same scale."""
    return len({weight.group if isinstance(weight, GatheredWeight) else None for weight in weights}) == 1


def transpose_weights(weights: Sequence[GatheredWeight]) -> Factor:
    """Return the transposed copy [H, padded O] of weights [O_i, H] that are one below the other, O being their sum."""
    first, *others = (weight.contents.values for weight in weights)
    scale = weights[0].contents.scale
    if runs_fp8_kernels(scale):
        # The kernel multiplies by 448 / amax. With this amax the factor is 1, so that each value is stored as it is.
        amax = scale.new_full((1,), LARGEST[WEIGHT_DTYPE]).view(torch.int32)
        transposed = quantise_parts(
            first, others, Layout(WEIGHT_DTYPE, False, False, True), Maxima(amax, None, None)
        ).transposed
        assert transposed is not None
        return Factor(transposed, scale)
    # Not every version of torch concatenates and pads FP8 values, so bytes are moved. The byte of zero is zero.
    rows = torch.cat([values.view(torch.uint8) for values in (first, *others)])
    return Factor(F.pad(rows.t(), (0, pad(len(rows)) - len(rows))).contiguous().view(WEIGHT_DTYPE), scale)
