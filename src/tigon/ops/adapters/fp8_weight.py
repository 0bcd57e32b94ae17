"""The frozen weights of layers with adapters whose products run in FP8: y = Q(x) Q(W)^T and dx = Q(dy) Q(W).

The layers of a node that have FP8 weights and the same input form a group. They share the FP8 copy of their input, and
the sum of their gradients of x is one product. The adapters are not part of it: their outputs are added to those of the
products.

With tensorwise scales, the kernel that writes x, or the gradients, may also find their largest absolute value and pass
it as `maximum`. Kernels that read them may do the pass that is missing (`fp8_operand`).

Shapes: T tokens, I inputs, O outputs of a layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from tigon.ops.adapters.fp8_operand import Fp8Operand, known_maximum
from tigon.ops.adapters.frozen_weight import FrozenWeight
from tigon.ops.adapters.projection import Projection
from tigon.ops.fp8.formats import WEIGHT_DTYPE, Fp8Options, runs_fp8_kernels
from tigon.ops.fp8.products import multiply_fp8
from tigon.ops.fp8.quantisation import Layout
from tigon.ops.fp8.weights import Fp8Weights, WeightCache, weight_rows, weight_transposed
from tigon.runtime.counters import zero_number

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

        A kernel that writes x raises it to the largest |x| for `operand`. A kernel that writes the gradients raises it
        to the largest |dy_i| of all layers for `operand_of_gradients`. The result is None if rows have scales of their
        own, or if no kernel quantises on the device of `like`.
        """
        return None if self.options.is_rowwise or not runs_fp8_kernels(like) else zero_number(like)

    def operand(self, x: Tensor, maximum: Tensor | None = None) -> Fp8Operand:
        """Return x [T, I] as the operand of `multiply`.

        `maximum` holds the bits of the largest |x|, if a kernel of the node has found it.
        """
        layout = Layout(WEIGHT_DTYPE, self.options.is_rowwise, True, False)
        return Fp8Operand({0: x}, layout, known_maximum(x, layout) if maximum is None else maximum)

    def multiply(self, x: Fp8Operand) -> Iterator[Tensor]:
        """Yield the products [T, O] of x [T, I] with the weights, in the order of `indices`.

        A product is computed when it is requested, so that it is still in the cache when the adapters add to it.
        """
        start, factor = 0, x.factor()
        copies = self.copies or weight_rows(None, "", self.weights, self.options.is_rowwise, False)
        for weight in self.weights:
            stop = start + weight.shape[0]
            yield multiply_fp8(factor, copies.rows_of(start, stop), self.dtype, is_fast=self.options.fast_forward)
            start = stop

    def end_forward(self) -> None:
        """Free copies that are not cached. Backward makes those that it needs."""
        self.copies = self.copies if self.is_cached else None

    def operand_of_gradients(self, dys: Mapping[int, Tensor], maximum: Tensor | None = None) -> Fp8Operand | None:
        """Return the gradients dy_i [T, O_i], side by side, as the operand of `input_gradient`.

        The result is None if `dys` has none of a layer of the group. `maximum` holds the bits of the largest |dy_i| of
        the group, if a kernel of the node has found it.
        """
        some_dy = next((dys[index] for index in self.indices if index in dys), None)
        if some_dy is None:
            return None
        parts = {
            index: dys[index] if index in dys else some_dy.new_zeros((len(some_dy), len(weight)))
            for index, weight in zip(self.indices, self.weights, strict=True)
        }
        layout = Layout(self.options.dtype_of_gradients, self.options.is_rowwise, True, False, by_columns=True)
        if maximum is None and len(parts) == 1:
            maximum = known_maximum(some_dy, layout)
        return Fp8Operand(parts, layout, maximum)

    def input_gradient(self, dys: Fp8Operand) -> Tensor:
        """Return the sum [T, I] of the products of the gradients with the weights."""
        transposed = weight_transposed(self.copies, self.weights, self.options.is_rowwise)
        return multiply_fp8(dys.factor(), transposed, self.dtype, is_fast=self.options.fast_backward)
