r"""The autograd nodes of experts whose products have low-rank adapters.

`LoRAExperts` computes all of `lora_moe_mlp` with frozen weights: for the row s of the choice (t, k) of expert e, with
x[s] = x[t], dy[s] = dy[t] and the weight w = w[t, k]:

    h[s] = x[s] U^T,  p[s] = x[s] A_u^T               without the adapter, s_u p[s] B_u^T
    a[s] = act(h[s] + s_u p[s] B_u^T),  q[s] = a[s] A_d^T
    z[s] = a[s] D^T + s_d q[s] B_d^T
    y[t] = sum_k w z[s]

    dq[s] = s_d dy[s] B_d                             without the weight w, like da in `moe_mlp`
    da[s] = dy[s] D + dq[s] A_d
    dh[s], (w a)[s], dw                               from da[s], h[s] and w: `tigon.ops.experts.activation`
    dB_d = s_d sum_s dy[s]^T (w q)[s]                 dA_d = sum_s dq[s]^T (w a)[s]
    dp[s] = s_u dh[s] B_u
    dB_u = s_u sum_s dh[s]^T p[s]                     dA_u = sum_s dp[s]^T x[s]
    dx[t] = sum_k dh[s] U + dp[s] A_u

No gradient of U and D is computed. Where the chip and the rank allow it, `grouped_low_rank_product` computes each
product with U or D together with its adapter. Elsewhere the products are those of `moe_mlp`. Then, up to rank
`LARGEST_FUSED_RANK`, `lora_expert_activation` adds the adapters of h and da when it reads them, and `grouped_low_rank`
adds the others in place. The activation computes q and dp up to this rank too. The node saves x, h, with its adapter or
without it, and p and w q as bf16 terms [S, 2, r], which are small. In `lean(mlp=True)` it saves neither h nor p, and
backward repeats the first product.

`AddGroupedAdapters` adds the adapters to a product that autograd differentiates.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate, r rank; S = T K rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.grouped_low_rank import (
    grouped_expand,
    grouped_project,
    grouped_sums,
    split_experts,
    spread_and_project,
)
from tigon.ops.adapters.grouped_low_rank_product import adds_in_product, grouped_low_rank_product
from tigon.ops.adapters.lora_expert_activation import (
    LARGEST_FUSED_RANK,
    ActivationAdapters,
    lora_activation_backward,
    lora_activation_forward,
)
from tigon.ops.adapters.low_rank import TERMS
from tigon.ops.experts.activation import NeededActivationGradients, activation_gradients
from tigon.ops.experts.arguments import ACTIVATIONS
from tigon.ops.experts.choice_order import Routing
from tigon.ops.experts.grouped_linear import grouped_product
from tigon.ops.experts.routing import combine, spread
from tigon.runtime.op import Node


class ExpertAdapter(NamedTuple):
    """The adapters of one product of all experts. They add s * x[s] A[e]^T B[e]^T to the result of the product."""

    a: Any  # Tensor [E, r, in]
    b: Any  # Tensor [E, out, r]
    scaling: float = 1.0


class _Factors(NamedTuple):
    """The factors of all adapters of one product, stacked by ranks, in the form that the kernels read."""

    a: Tensor  # A, [E, R, in] or its terms
    b: Tensor  # The terms of s B^T, [terms, E, R, out]


def _split(adapters: Sequence[ExpertAdapter], terms_of_b: int = 2) -> _Factors | None:
    """Return the factors, or None if there is no adapter. Only a product z B with B^T needs two terms of B in bf16."""
    if not adapters:
        return None
    a, *other_as = [adapter.a for adapter in adapters]
    b, *other_bs = [adapter.b.mT for adapter in adapters]
    scalings = [adapter.scaling for adapter in adapters]
    return _Factors(split_experts(a, other_as), split_experts(b, other_bs, scalings, terms_of_b))


def _is_fused(up: _Factors | None, down: _Factors | None) -> bool:
    """Return whether the kernels of the activation compute the low-rank products beside it."""
    ranks = [factors.a.shape[-2] for factors in (up, down) if factors is not None]
    return bool(ranks) and max(ranks) <= LARGEST_FUSED_RANK


class _FirstProduct(NamedTuple):
    h: Tensor  # [S, 2 I] or [S, I]
    is_complete: bool  # True if h contains its adapter
    p: Tensor | None  # The terms of p [S, 2, R], or None without an adapter


def _first_product(
    x: Tensor, up: Tensor, factors: _Factors | None, routing: Routing, transposed: bool, is_fused: bool
) -> _FirstProduct:
    """Compute the first product of the rows of x. A second call gives the same bits."""
    up = up if transposed else up.mT
    if factors is None:
        return _FirstProduct(grouped_product(spread(x, routing), up, routing.ends), True, None)
    rows, p = spread_and_project(x, factors.a, routing)
    if not is_fused or adds_in_product(rows, up, factors.b):
        return _FirstProduct(grouped_low_rank_product(rows, up, p, factors.b, routing), True, p)
    return _FirstProduct(grouped_product(rows, up, routing.ends), False, p)


class _Operand(NamedTuple):
    """The factors of a sum over the rows of each expert."""

    z: Any  # [S, N], or [T, N] if `gathers` is True.
    # The terms of the low-rank products, [S, 2, R].
    h: Any
    gathers: bool = False

    def sums(self, column: int, like: Tensor, routing: Routing, factor: float = 1.0) -> Tensor:
        """Return the sums for the columns of one adapter, in the dtype and with the strides of `like` [E, r, N]."""
        # `empty_like` keeps the order of the strides, so the gradient of PEFT's B is a view of a tensor [out, r E].
        out = torch.empty_like(like)
        return grouped_sums(self.z, self.h, column, out, routing, self.gathers, factor)


def _factor_gradients(
    adapters: Sequence[ExpertAdapter], needs: Sequence[ExpertAdapter], inputs: _Operand, outputs: _Operand,
    routing: Routing,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of A and B of each adapter of one product. `needs` has flags in place of tensors. `inputs`
    are the input of the product and the gradients of its low-rank products. `outputs` are the upstream gradient and the
    low-rank products."""
    gradients: list[Tensor | None] = []
    column = 0
    for adapter, need in zip(adapters, needs, strict=True):
        gradients.append(inputs.sums(column, adapter.a, routing) if need.a else None)
        gradients.append(outputs.sums(column, adapter.b.mT, routing, adapter.scaling).mT if need.b else None)
        column += adapter.a.shape[1]
    return gradients


class ExpertsCall(NamedTuple):
    """The options of a call of `LoRAExperts`. `scalings` has a tuple for each of the two products."""

    kind: str
    transposed: bool
    scalings: tuple[tuple[float, ...], tuple[float, ...]]
    saves_h: bool


class LoRAExperts(Node):
    """Compute y from x, the weights of the router, and the factors A and B in turn of the adapters of both products."""

    def forward(
        ctx: Any, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing, call: ExpertsCall,
        *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        x, weights = _rows(x), weights.contiguous()
        kind, transposed, scalings, saves_h = call
        up_factors, down_factors = (_split(adapters, TERMS[x.dtype]) for adapters in _rebuild(factors, scalings))
        q = wq = None
        is_fused = _is_fused(up_factors, down_factors)
        h, is_complete, p = _first_product(x, up, up_factors, routing, transposed, is_fused)
        if is_fused:
            adapters = ActivationAdapters(
                None if is_complete else p,
                None if is_complete or up_factors is None else up_factors.b,
                None if down_factors is None else down_factors.a,
            )
            a, q, wq = lora_activation_forward(h, adapters, weights, routing, kind)
        else:
            a = ACTIVATIONS[kind][0](h)
            if down_factors is not None:
                q, wq = grouped_project(a, down_factors.a, routing, False, weights)
        b = None if down_factors is None else down_factors.b
        z = grouped_low_rank_product(a, down if transposed else down.mT, q, b, routing)
        del a
        ctx.save_for_backward(x, weights, up, down, *((h, p) if saves_h else (None, None)), wq, *routing, *factors)
        ctx.call, ctx.is_complete = call, is_complete
        del h
        return combine(z, weights, routing, x.dtype)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, up, down, h, p, wq, slot, order, expert, ends, *factors = ctx.saved_tensors
        kind, transposed, scalings, _ = ctx.call
        routing, dy = Routing(slot, order, expert, ends), _rows(dy)
        up_adapters, down_adapters = _rebuild(factors, scalings)
        up_needs, down_needs = _rebuild(ctx.needs_input_grad[6:], scalings)
        needs_x, needs_weights = ctx.needs_input_grad[:2]
        needs_dh = needs_x or any(need.a or need.b for need in up_needs)
        needs_wa = any(need.a for need in down_needs)
        needs_dp = bool(up_adapters) and (needs_x or any(need.a for need in up_needs))
        da = dq = dp = dh = wa = dweights = dx = None
        up_factors, down_factors = _split(up_adapters), _split(down_adapters)
        is_fused = _is_fused(up_factors, down_factors)
        if h is None:
            terms = _split(up_adapters, TERMS[x.dtype])
            h, _, p = _first_product(x, up, terms, routing, transposed, is_fused)
            del terms
        adds_dq, up, down = True, up.mT if transposed else up, down.mT if transposed else down

        if needs_dh or needs_weights:
            if down_factors is None:
                da = grouped_product(spread(dy, routing), down, ends)
            else:
                rows, dq = spread_and_project(dy, down_factors.b, routing)
                # As in the forward, the activation adds the adapter if the product does not.
                adds_dq = not is_fused or adds_in_product(rows, down, down_factors.a)
                if adds_dq:
                    da = grouped_low_rank_product(rows, down, dq, down_factors.a, routing)
                else:
                    da = grouped_product(rows, down, ends)
                del rows
        elif down_factors is not None and needs_wa:
            dq, _ = grouped_project(dy, down_factors.b, routing, gathers=True)
        needs = NeededActivationGradients(needs_dh, needs_wa, needs_weights, needs_dp)
        if is_fused and (da is not None or needs_wa):
            reads_b = up_factors is not None and (needs_dp or not ctx.is_complete)
            adapters = ActivationAdapters(
                None if ctx.is_complete else p,
                up_factors.b if up_factors is not None and reads_b else None,
                None if down_factors is None else down_factors.a,
            )
            dh, wa, dweights, dp = lora_activation_backward(
                h, da, adapters, None if da is None or adds_dq else dq, weights, routing, kind, needs
            )
        elif da is not None or needs_wa:
            dh, wa, dweights = activation_gradients(h, da, weights, routing, kind, needs)
            if up_factors is not None and dh is not None and needs_dp:
                dp, _ = grouped_project(dh, up_factors.b, routing, gathers=False)
        del da, down_factors
        down_gradients = _factor_gradients(down_adapters, down_needs, _Operand(wa, dq), _Operand(dy, wq, True), routing)
        del wa
        up_gradients = _factor_gradients(up_adapters, up_needs, _Operand(x, dp, True), _Operand(dh, p), routing)
        if needs_x:
            assert dh is not None
            rows = grouped_low_rank_product(dh, up, dp, None if up_factors is None else up_factors.a, routing)
            del dh
            dx = combine(rows, None, routing, dy.dtype)
        return dx, dweights, *(None,) * 4, *up_gradients, *down_gradients


def _rows(x: Tensor) -> Tensor:
    """Return x [T, H] with dense rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rebuild(
    factors: Sequence[Any], scalings: tuple[tuple[float, ...], tuple[float, ...]]
) -> tuple[list[ExpertAdapter], list[ExpertAdapter]]:
    """Return the adapters of the first and of the second product. Flags may replace the tensors A and B."""
    values = iter(factors)
    up, down = ([ExpertAdapter(next(values), next(values), scaling) for scaling in group] for group in scalings)
    return up, down


class AddGroupedAdapters(Node):
    """Add the low-rank products of sorted rows x [S, N] to y [S, M], the product with the weights, in place."""

    def forward(
        ctx: Any, x: Tensor, y: Tensor, routing: Routing, scalings: tuple[float, ...], *factors: Tensor
    ) -> Tensor:
        (adapters, _), x = _rebuild(factors, (scalings, ())), _rows(x)
        terms: Any = _split(adapters)
        p, _ = grouped_project(x, terms.a, routing, gathers=False)
        grouped_expand(p, terms.b, y, routing)
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, p, *routing, *factors)
        ctx.scalings = scalings
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, p, slot, order, expert, ends, *factors = ctx.saved_tensors
        routing, rows = Routing(slot, order, expert, ends), _rows(dy)
        (adapters, _), (needs, _) = (_rebuild(f, (ctx.scalings, ())) for f in (factors, ctx.needs_input_grad[4:]))
        terms: Any = _split(adapters)
        dp, _ = grouped_project(rows, terms.b, routing, gathers=False)
        gradients = _factor_gradients(adapters, needs, _Operand(x, dp), _Operand(rows, p), routing)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(x)
            grouped_expand(dp, terms.a, dx, routing)
        return dx, dy, None, None, *gradients
