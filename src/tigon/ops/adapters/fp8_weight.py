"""The frozen weights of layers with adapters whose products run in FP8: y = Q(x) Q(W)^T and dx = Q(dy) Q(W).

The layers of a node that have FP8 weights and the same input form a group. They share the FP8 copy of their input, and
the sum of their gradients of x is one product. The adapters are not part of it: their outputs are added to those of the
products.

With tensorwise scales, the kernel that writes x, or the gradients, may also find their largest absolute value and pass
it as `maximum`. Without it, a pass over these tensors finds what their scales need.

Shapes: T tokens, I inputs, O outputs of a layer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from tigon.ops.adapters.frozen_weight import FrozenWeight
from tigon.ops.adapters.projection import Projection
from tigon.ops.fp8.formats import WEIGHT_DTYPE, Fp8Options, runs_fp8_kernels
from tigon.ops.fp8.products import multiply_fp8
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_tensor
from tigon.ops.fp8.weights import Fp8Weights, WeightCache, weight_rows, weight_transposed
from tigon.runtime.maxima import Maxima, MaximaNeeds, find, zero_maxima

__all__ = ["Fp8Group", "Fp8Weight"]

FindCache = Callable[[Sequence[Tensor], Sequence[int | None]], WeightCache | None]


class Fp8Weight(FrozenWeight):
    """A frozen weight [O, I] whose products run in FP8.

    Args:
        weight: The weight.
        options: The options of the products.
        find_cache: `find_cache(weights, merges)` returns the cache for a group of weights that begins with this one,
            from the weights and from their `merges`. Without this function, each call quantises the group.
        merges: A number that is different after a merge of adapters into the weight; None if there are no adapters.
    """

    def __init__(
        self, weight: Tensor, options: Fp8Options, find_cache: FindCache | None, merges: int | None = None
    ) -> None:
        super().__init__(weight.detach, weight.shape, weight.dtype, weight.device)
        self.weight, self.options, self.find_cache, self.merges = weight, options, find_cache, merges


def _maxima(maximum: Tensor | None) -> Maxima | None:
    return None if maximum is None else Maxima(maximum, None, None)


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
        self.copies: Fp8Weights | None = weight_rows(cache, "base", self.weights, self.options.is_rowwise, needs_dx)
        self.is_cached = cache is not None

    @staticmethod
    def of(projections: Sequence[Projection], needs_dx: bool) -> "Fp8Group | None":
        """Return the group of those projections that have FP8 weights; None if there are none."""
        weights = {i: each.weight for i, each in enumerate(projections) if isinstance(each.weight, Fp8Weight)}
        return Fp8Group(weights, needs_dx) if weights else None

    def zero_maximum(self, like: Tensor) -> Tensor | None:
        """Return a zero [1] int32, in which a kernel collects the bits of the largest absolute value.

        A kernel that writes x raises it to the largest |x| for `multiply`. A kernel that writes the gradients raises it
        to the largest |dy_i| of all layers for `input_gradient`. The result is None if rows have scales of their own,
        or if no kernel quantises on the device of `like`.
        """
        if self.options.is_rowwise or not runs_fp8_kernels(like):
            return None
        return zero_maxima(like, 0, 0, MaximaNeeds(tensor=True)).tensor

    def missing_maximum(self, x: Tensor) -> Tensor | None:
        """Return `zero_maximum` for a kernel that reads x [T, I]; None if the op that wrote x has found its maxima."""
        is_known = not self.options.is_rowwise and find(x, MaximaNeeds(tensor=True)) is not None
        return None if is_known else self.zero_maximum(x)

    def missing_gradient_maximum(self, dys: Mapping[int, Tensor], read: Collection[int]) -> Tensor | None:
        """Return `zero_maximum` for kernels that read the gradients dy_i of the layers `read`.

        The result is None if they do not read all gradients of the group, or if the maxima of its only one are known.
        """
        present = [index for index in self.indices if index in dys]
        if not present or not all(index in read for index in present):
            return None
        first = dys[present[0]]
        return self.missing_maximum(first) if len(self.indices) == 1 else self.zero_maximum(first)

    def multiply(self, rows: Tensor, maximum: Tensor | None = None) -> dict[int, Tensor]:
        """Return the products [T, O] of x [T, I] with the weights, by the indices of the layers.

        `maximum` holds the bits of the largest |x|, if a kernel of the node has found it.
        """
        options, outputs, start = self.options, {}, 0
        layout = Layout(WEIGHT_DTYPE, options.is_rowwise, True, False)
        x = quantise_tensor(rows, layout, _maxima(maximum)).rows
        copies = self.copies or weight_rows(None, "", self.weights, options.is_rowwise, False)
        assert x is not None
        for index, weight in zip(self.indices, self.weights, strict=True):
            stop = start + weight.shape[0]
            factor = copies.rows_of(start, stop)
            outputs[index] = multiply_fp8(x, factor, self.dtype, is_fast=options.fast_forward)
            start = stop
        return outputs

    def end_forward(self) -> None:
        """Free copies that are not cached. Backward makes those that it needs."""
        self.copies = self.copies if self.is_cached else None

    def input_gradient(self, dys: Mapping[int, Tensor], maximum: Tensor | None = None) -> Tensor | None:
        """Return the sum [T, I] of the products of dy_i [T, O_i] with the weights; None if `dys` has no such layer.

        `maximum` holds the bits of the largest |dy_i| of the group, if a kernel of the node has found it.
        """
        present = [dys[index] for index in self.indices if index in dys]
        if not present:
            return None
        options, maxima = self.options, _maxima(maximum)
        parts = [
            dys[index] if index in dys else present[0].new_zeros((len(present[0]), len(weight)))
            for index, weight in zip(self.indices, self.weights, strict=True)
        ]
        layout = Layout(options.dtype_of_gradients, options.is_rowwise, True, False, by_columns=True)
        if len(parts) > 1:
            dy = quantise(parts, layout, maxima).rows
        else:
            dy = quantise_tensor(parts[0], layout, maxima).rows
        assert dy is not None
        transposed = weight_transposed(self.copies, self.weights, options.is_rowwise)
        return multiply_fp8(dy, transposed, self.dtype, is_fast=options.fast_backward)
