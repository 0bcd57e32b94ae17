"""The frozen weights of layers with adapters whose products run in FP8: y = Q(x) Q(W)^T and dx = Q(dy) Q(W).

The layers of a node that have FP8 weights and the same input form a group. They share the FP8 copy of their input, and
the sum of their gradients of x is one product. The adapters are not part of it: their outputs are added to those of the
products.

With tensorwise scales, the kernel that writes x or the gradients may find their largest absolute value, which the node
passes as `maximum`. If it is known, the kernel of a low-rank product, which reads the tensor anyway, writes the FP8
copy. If it is not known, this kernel finds it, and a separate pass writes the copy.

Shapes: T tokens, I inputs, O outputs of a layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.ops.adapters.projection import FrozenWeight
from tigon.ops.fp8.formats import E4M3, Factor, Fp8Options, FusedPass, runs_fp8_kernels
from tigon.ops.fp8.products import multiply_fp8
from tigon.ops.fp8.quantisation import Layout, Quantised, quantise
from tigon.ops.fp8.weights import WeightCache, weight_rows, weight_transposed
from tigon.runtime.counters import zero_number

FindCache = Callable[[Sequence[Tensor], Sequence[int | None]], WeightCache | None]


class Fp8Weight(FrozenWeight):
    """A frozen weight [O, I] whose products run in FP8. `find_cache(weights, merges)` returns the cache of a group of
    weights that begins with this one; without it, each call quantises the group. `merges` is a number that is different
    after a merge of adapters into the weight, or None without adapters."""

    def __init__(
        self, weight: Tensor, options: Fp8Options, find_cache: FindCache | None, merges: int | None = None
    ) -> None:
        super().__init__(weight.detach, weight.shape, weight.dtype, weight.device)
        self.weight, self.options, self.find_cache, self.merges = weight, options, find_cache, merges


class Fp8Group:
    """The layers of a node whose weights are in FP8, and the FP8 copies of these weights."""

    def __init__(self, weights: Mapping[int, Fp8Weight], needs_dx: bool) -> None:
        first = next(iter(weights.values()))
        # The indices of the layers in the node.
        self.indices = tuple(weights)
        self.options, self.dtype = first.options, first.dtype
        self.weights = [each.weight for each in weights.values()]
        is_cacheable = all(each.find_cache is not None for each in weights.values())
        cache = None
        if is_cacheable and first.find_cache is not None:
            cache = first.find_cache(self.weights, [each.merges for each in weights.values()])
        self.copies: Quantised | None = weight_rows(cache, "base", self.weights, self.options.is_rowwise, needs_dx)
        self.is_cached = cache is not None

    @staticmethod
    def of(weights: Sequence[Any], needs_dx: bool) -> "Fp8Group | None":
        """Return the group of those layers whose weights are in FP8; None if there are none."""
        fp8_weights = {i: weight for i, weight in enumerate(weights) if isinstance(weight, Fp8Weight)}
        return Fp8Group(fp8_weights, needs_dx) if fp8_weights else None

    def zero_maximum(self, like: Tensor) -> Tensor | None:
        """Return a zero [1] int32 for a kernel that finds the maximum of an operand; None if no copy needs it."""
        return None if self.options.is_rowwise or not runs_fp8_kernels(like) else zero_number(like)

    def operand(self, x: Tensor, maximum: Tensor | None = None) -> "Fp8Operand":
        """Return x [T, I], whose maximum a kernel may have found, as the operand of the products of the layers."""
        return Fp8Operand(self, {0: x}, Layout(self.options.is_rowwise, True, False), maximum)

    def operand_of_gradients(self, dys: Mapping[int, Tensor], maximum: Tensor | None = None) -> "Fp8Operand | None":
        """Return the gradients dy_i [T, O_i], side by side, as the operand of dX; None if the group has none."""
        present = {index: dys[index] for index in self.indices if index in dys}
        layout = Layout(self.options.is_rowwise, True, False, by_columns=True)
        return Fp8Operand(self, present, layout, maximum) if present else None

    def end_forward(self) -> None:
        """Free copies that are not cached. Backward makes those that it needs."""
        self.copies = self.copies if self.is_cached else None


class Fp8Operand:
    """One side of the FP8 products of a group, not yet quantised: x [T, I], or the gradients [T, O_i] side by side. The
    parts are the gradients by the indices of their layers, of which some may be missing, or x with the key 0. `maximum`
    [1] holds the bits of the largest absolute value of all parts, if a kernel of the node has found it."""

    def __init__(self, group: Fp8Group, parts: Mapping[int, Tensor], layout: Layout, maximum: Tensor | None) -> None:
        self.group, self.parts, self.layout = group, parts, layout
        self.maximum = maximum
        self.copy: Factor | None = None
        self.has_passes = False

    def fused_passes(self, read_indices: Collection[int]) -> dict[int, FusedPass]:
        """Return the fused passes for the kernels that read the parts `read_indices`, by the index of the part. Exactly
        one kernel must do the pass of each index before the products are computed. The result is empty if not all parts
        are present and read by kernels that quantise."""
        assert not self.has_passes, "each operand has its passes done once"
        some_part = next(iter(self.parts.values()))
        is_whole = not self.layout.by_columns or len(self.parts) == len(self.group.indices)
        if self.layout.is_rowwise or not is_whole or not all(index in read_indices for index in self.parts):
            return {}
        if not runs_fp8_kernels(some_part):
            return {}
        self.has_passes = True
        if self.maximum is None:
            self.maximum = zero_number(some_part)
            return dict.fromkeys(self.parts, FusedPass(self.maximum))
        widths = [part.shape[1] for part in self.parts.values()]
        values = some_part.new_empty((len(some_part), sum(widths)), dtype=E4M3)
        scale = some_part.new_empty(1, dtype=torch.float32)
        self.copy = Factor(values, scale)
        windows = values.split(widths, 1) if len(widths) > 1 else (values,)
        passes = (FusedPass(self.maximum, Factor(window, scale)) for window in windows)
        return dict(zip(self.parts, passes, strict=True))

    def _take_copy(self) -> Factor:
        """Return the FP8 copy, and quantise the parts if no kernel has written it. The operand does not keep it."""
        copy, self.copy = self.copy, None
        if copy is None:
            copy = quantise(self._all_parts(), self.layout, self.maximum).copy()
        return copy

    def _all_parts(self) -> list[Tensor]:
        """Return x, or the gradients of all layers of the group. Those that are missing are zero."""
        some_part = next(iter(self.parts.values()))
        if not self.layout.by_columns:
            return [some_part]
        return [
            self.parts[index] if index in self.parts else some_part.new_zeros((len(some_part), len(weight)))
            for index, weight in zip(self.group.indices, self.group.weights, strict=True)
        ]

    def products(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each layer and the product [T, O] of x with its weight, which is then in the L2 cache."""
        group, start, copy = self.group, 0, self._take_copy()
        copies = group.copies or weight_rows(None, "", group.weights, group.options.is_rowwise, False)
        for index, weight in zip(group.indices, group.weights, strict=True):
            stop = start + weight.shape[0]
            rows = copies.rows_of(start, stop)
            yield index, multiply_fp8(copy, rows, group.dtype, is_fast=True)
            start = stop

    def input_gradient(self) -> Tensor:
        """Return the sum [T, I] of the products of the gradients with the weights of the group."""
        group = self.group
        transposed = weight_transposed(group.copies, group.weights, group.options.is_rowwise)
        return multiply_fp8(self._take_copy(), transposed, group.dtype)
