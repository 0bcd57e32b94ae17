r"""A product of rows with the weights of their experts in FP8, which autograd differentiates.

    y[s] = Q(x)[s] Q(W)[g(s)]^T
    dx[s] = Q(dy)[s] Q(W)[g(s)],    dW[g] = sum over its rows dy[s]^T x[s]       in the dtype of W, without Q

This is the form of `grouped_linear` for experts whose activation is a function of the user. It saves x in the dtype of
W, as `grouped_linear` does.

Shapes: S rows, E groups, N and M features.
"""

from typing import Any, NamedTuple

from torch import Tensor

from tigon.ops.experts.fp8_products import find_copy, fp8_row_product, quantise_rows
from tigon.ops.experts.grouped_linear import grouped_weight_gradient
from tigon.ops.fp8.weights import WeightCache
from tigon.runtime.op import Node


class Fp8Source(NamedTuple):
    """The source of the FP8 copies of a weight: its name in a cache, or no cache if each product makes its copy."""

    name: str
    cache: WeightCache | None


def fp8_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool, source: Fp8Source) -> Tensor:
    """Return `fp8_grouped_linear` without autograd."""
    by_rows = not transposed
    copy = find_copy(source.cache, source.name, weight, by_rows)
    return fp8_row_product(quantise_rows(x), weight, copy, ends, by_rows)


class _Fp8GroupedLinear(Node):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool, name: str, cache: WeightCache | None
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None, ends)
        ctx.transposed, ctx.source = transposed, Fp8Source(name, cache)
        return fp8_product(x, weight, ends, transposed, ctx.source)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        dx = None if weight is None else fp8_product(dy, weight, ends, not ctx.transposed, ctx.source)
        dweight = None
        if x is not None:
            first, second = (x, dy) if ctx.transposed else (dy, x)
            dweight = grouped_weight_gradient(first, second, ends)
        return dx, dweight


def fp8_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool, source: Fp8Source) -> Tensor:
    """Return [S, M] for x [S, N] and weight [E, M, N], or [E, N, M] if `transposed`, of one dtype.

    `ends` [E] int32 is one past the last row of each group. The sizes of the weight are multiples of 16.
    """
    return _Fp8GroupedLinear.apply(x, weight, ends, transposed, *source)
