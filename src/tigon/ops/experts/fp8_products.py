r"""The products of experts that run in FP8: those of forward and those that are gradients of rows.

    h = Q(x) Q(U)^T,  z = Q(a) Q(D)^T        a = act(h)
    da = Q(dy) Q(D),  dx = Q(dh) Q(U)

Q rounds each row of a first factor with a scale of its own, and each output of a weight (`tigon.ops.fp8.stacks`). x and
dy are quantised before they are spread to the rows of their experts (`tigon.ops.experts.fp8_rows`). dh exists in the
dtype of the weights too, because dU is a product in this dtype, and a separate pass quantises it. One kernel computes
and quantises act(gate) * up. Without a gate, these are two kernels.

The gradients of the weights stay in the dtype of the weights: their grouped products save at most 16 % in FP8, without
the time to quantise (docs/fp8.md). They sum over tokens, so both factors would have to be quantised along the tokens of
each expert.

Shapes: T tokens, K choices each, S = T K rows, E experts, H hidden, I intermediate.
"""

from typing import NamedTuple

from torch import Tensor

from tigon.ops.experts.arguments import ACTIVATIONS
from tigon.ops.experts.choice_order import Routing
from tigon.ops.experts.fp8_rows import quantise_and_spread
from tigon.ops.fp8.formats import Factor
from tigon.ops.fp8.products import multiply_groups
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_gated
from tigon.ops.fp8.weights import WeightCache, quantise_weights

_ROWS = Layout(True, True, False)


class WeightCopy(NamedTuple):
    """The FP8 copy of a stack of weights for one direction. Both tensors are None if the product makes the copy."""

    values: Tensor | None  # [E, out, in] fp8
    scale: Tensor | None  # [E, out] fp32


NO_COPY = WeightCopy(None, None)


class Fp8Source(NamedTuple):
    """The source of the FP8 copies of a weight: its name in a cache, or no cache if each product makes its copy."""

    name: str
    cache: WeightCache | None


class ExpertCopies(NamedTuple):
    """Says whether the products of a call run in FP8, and holds the copies of the weights that exist already."""

    in_fp8: bool
    up: WeightCopy
    down: WeightCopy


# The products run in the dtype of the weights.
IN_DTYPE = ExpertCopies(False, NO_COPY, NO_COPY)


def find_copy(cache: WeightCache | None, name: str, weight: Tensor | None, by_rows: bool) -> WeightCopy:
    """Return the copy of one weight as `find_copies` does."""
    if cache is None or weight is None:
        return NO_COPY
    copies = cache.find(name, [weight], True, by_rows, not by_rows)
    return WeightCopy(*(copies.rows if by_rows else copies.transposed))  # type: ignore[misc]


def find_copies(
    in_fp8: bool, cache: WeightCache | None, up: Tensor | None, down: Tensor | None, by_rows: bool
) -> ExpertCopies:
    """Return the copies for one direction. The cache makes those that are missing; without it, the products do. A
    weight is None if no product in FP8 reads it. `by_rows`: the products sum along the last dimension of the stored
    weights."""
    if not in_fp8:
        return IN_DTYPE
    return ExpertCopies(True, find_copy(cache, "up", up, by_rows), find_copy(cache, "down", down, by_rows))


def _factor(weight: Tensor, copy: WeightCopy, by_rows: bool) -> Factor:
    """Return the copy of a weight for a product, and make it if there is none. The caller's product frees it again."""
    if copy.values is not None and copy.scale is not None:
        return Factor(copy.values, copy.scale)
    return quantise_weights([weight], True, by_rows, not by_rows).copy(by_rows)


def quantise_rows(x: Tensor) -> Factor:
    """Return the FP8 rows of x [S, M]."""
    return quantise([x], _ROWS).copy()


def quantise_activated(h: Tensor, kind: str) -> Factor:
    """Return the FP8 rows of act(h) [S, I], for the result h of the first product."""
    run, _, width = ACTIVATIONS[kind]
    if width == 1:
        return quantise_rows(run(h))
    gate, up = h.chunk(2, -1)
    return quantise_gated(gate, up, kind, _ROWS).copy()


# In both functions, `by_rows` means: the product sums along the last dimension of the stored weight. The result has the
# dtype of the weight.


def fp8_token_product(
    x: Tensor, router_weights: Tensor | None, weight: Tensor, copy: WeightCopy, routing: Routing, by_rows: bool
) -> Tensor:
    """Return the products [S, N] of the tokens x [T, M] with the weights of their experts. If router_weights [T, K] is
    not None, they scale the tokens."""
    rows = quantise_and_spread(x, router_weights, routing)
    return multiply_groups(rows, _factor(weight, copy, by_rows), routing.ends, weight.dtype)


def fp8_row_product(rows: Factor, weight: Tensor, copy: WeightCopy, ends: Tensor, by_rows: bool) -> Tensor:
    """Return the products [S, N] of the FP8 rows [S, M] with the weights of their experts."""
    return multiply_groups(rows, _factor(weight, copy, by_rows), ends, weight.dtype)
