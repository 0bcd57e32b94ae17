"""The products of experts that autograd differentiates, because the activation is a function of the user.

Each operator saves its own tensors. In a block of `lean`, backward recomputes the rows of x [S, H], and in
`lean(mlp=True)` also the result of the first product. The tensors that remain saved are x and those of the routing. A
product in FP8 saves x in the dtype of W, because dW is computed without rounding to FP8.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate; S = T K rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.memory.lean import recomputed_by_call, recomputes_mlp, register_recomputation
from tigon.ops.experts.choice_order import Routing
from tigon.ops.experts.fp8_products import Fp8Source
from tigon.ops.experts.grouped_linear import grouped_linear, row_product, rows_of_groups
from tigon.ops.experts.routing import spread


class RoutingMatrices(NamedTuple):
    """A routing as tensors of two dimensions, except for `ends`. A recomputation copies tensors of one dimension."""

    slot: Tensor  # [T, K]
    order: Tensor  # [T, K]
    expert: Tensor  # [T, K]
    ends: Tensor  # [E]

    @staticmethod
    def of(routing: Routing) -> "RoutingMatrices":
        shape = routing.slot.shape
        return RoutingMatrices(routing.slot, routing.order.view(shape), routing.expert.view(shape), routing.ends)

    def routing(self) -> Routing:
        return Routing(self.slot, self.order.flatten(), self.expert.flatten(), self.ends)


@recomputed_by_call
def spread_rows(x: Tensor, dtype: torch.dtype | None, *matrices: Tensor) -> Tensor:
    """Return `spread` of x. A block of `lean` recomputes the result."""
    return spread(x, RoutingMatrices(*matrices).routing(), dtype)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, transposed: bool, fp8: Fp8Source | None = None
) -> Tensor:
    """Return the product of each row of x with the weight of its expert, plus the bias, without autograd. The product
    runs in FP8 if `fp8` is not None."""
    return add_bias(row_product(x, weight, routing.ends, transposed, fp8), bias, routing)


def add_bias(y: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Add the bias [E, M] of its expert to each row of y [S, M], in place. None stands for no bias."""
    return y if bias is None else y.add_(bias[routing.group])


def differentiated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, transposed: bool, fp8: Fp8Source | None = None
) -> Tensor:
    """Return the same as `product`, with autograd."""
    y = grouped_linear(x, weight, routing.ends, transposed, fp8)
    return y if bias is None else y.add_(rows_of_groups(bias, routing.group, routing.ends))


def _repeat_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, fp8: Fp8Source | None, *matrices: Tensor
) -> Tensor:
    return product(x, weight, bias, RoutingMatrices(*matrices).routing(), transposed, fp8)


def first_product(
    x: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, routing: Routing, transposed: bool,
    weight_inputs: bool, fp8: Fp8Source | None = None,
) -> Tensor:  # fmt: skip
    """Return the first product [S, 2 I] or [S, I], with autograd. A block of `lean(mlp=True)` recomputes it."""
    matrices = RoutingMatrices.of(routing)
    inputs = spread_rows(x, None if weight_inputs else up.dtype, *matrices)
    if weight_inputs:
        # The gradients of rows that belong to no expert are undefined, and must not reach the weights.
        factors = weights.flatten()[routing.order, None].masked_fill(routing.absent, 0.0)
        inputs = (inputs * factors).to(up.dtype)
    h = differentiated_product(inputs, up, up_bias, routing, transposed, fp8)
    # The weighted inputs [S, H] would be saved in place of h, which would save little or nothing.
    if recomputes_mlp() and not weight_inputs:
        register_recomputation(h, _repeat_product, inputs, up, up_bias, transposed, fp8, *matrices)
    return h
