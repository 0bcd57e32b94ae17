r"""The MLPs of a mixture of experts with low-rank adapters on their frozen weights, as one autograd node.

Each expert e has factors A_u, B_u for the first product and A_d, B_d for the second one. For the row s of the choice
(t, k), with x[s] = x[t], dy[s] = dy[t] and the weight w = w[t, k]:

    h[s] = x[s] U^T + s_u p[s] B_u^T                  p[s] = x[s] A_u^T
    a[s] = act(h[s])
    z[s] = a[s] D^T + s_d q[s] B_d^T                  q[s] = a[s] A_d^T
    y[t] = sum_k w z[s]

    dq[s] = s_d dy[s] B_d                             without the weight w, like da in `moe_mlp`
    da[s] = dy[s] D + dq[s] A_d
    dh[s], (w a)[s], dw                               from da[s], h[s] and w: `tigon.ops.experts.activation`
    dB_d = s_d sum_s w dy[s]^T q[s]                   dA_d = sum_s dq[s]^T (w a)[s]
    dp[s] = s_u dh[s] B_u
    dB_u = s_u sum_s dh[s]^T p[s]                     dA_u = sum_s dp[s]^T x[s]
    dx[t] = sum_k dh[s] U + dp[s] A_u

PEFT's code adds s B A to the weights of all experts in each forward, and backward computes the gradient of this sum,
which has the size of the weights. Here no tensor of that size exists. The products with U and D are those of `moe_mlp`,
`grouped_low_rank` adds the low-rank products to their results in place, and no gradient of U and D is computed. The
node saves x, h, and p and q [S, r] in fp32, which are small.

The node needs bf16 or fp16, frozen weights without biases and an activation that has a name. In any other case autograd
differentiates the same grouped products.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate, r rank; S = T K rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.grouped_low_rank import grouped_expand, grouped_project, grouped_sums, split_experts
from tigon.ops.adapters.lora_expert_activation import (
    LARGEST_FUSED_RANK,
    ActivationAdapters,
    NeededActivationGradients,
    lora_activation_backward,
    lora_activation_forward,
)
from tigon.ops.adapters.low_rank import TERMS
from tigon.ops.experts.activation import activation_gradients
from tigon.ops.experts.grouped_linear import grouped_linear, grouped_product, rows_of_groups
from tigon.ops.experts.moe_mlp import ACTIVATIONS, ExpertParameters, check_activated, check_experts, moe_mlp_reference
from tigon.ops.experts.routing import Routing, combine, route, spread
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, without_autocast
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.torch_private.autograd import has_active_transform

__all__ = ["ExpertAdapter", "adapted_moe_mlp", "lora_moe_mlp", "lora_moe_mlp_reference"]


class ExpertAdapter(NamedTuple):
    """The adapters of one product of all experts. They add s * x[s] A[e]^T B[e]^T to the result of the product."""

    a: Any  # Tensor [E, r, in]
    b: Any  # Tensor [E, out, r]
    scaling: float = 1.0


# --- reference -----------------------------------------------------------------------------------


def lora_moe_mlp_reference(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor,
    up_scaling: float = 1.0, down_scaling: float = 1.0,
    *, transposed: bool = False, activation: str | Callable[[Tensor], Tensor] = "silu",
) -> Tensor:  # fmt: skip
    """Compute `lora_moe_mlp` in eager torch as PEFT does, with the sums of weights and adapters as tensors."""
    up = _weight_with_adapter(up_proj, ExpertAdapter(up_a, up_b, up_scaling), transposed)
    down = _weight_with_adapter(down_proj, ExpertAdapter(down_a, down_b, down_scaling), transposed)
    return moe_mlp_reference(x, up, down, top_k_index, top_k_weights, transposed=transposed, activation=activation)


def _weight_with_adapter(weight: Tensor, adapter: ExpertAdapter, transposed: bool) -> Tensor:
    """Return W + s B A, computed in the dtype of W."""
    a, b = adapter.a.to(weight.dtype), adapter.b.to(weight.dtype)
    factors = (a.mT, b.mT) if transposed else (b, a)
    return torch.baddbmm(weight, *factors, alpha=adapter.scaling)


# --- the node --------------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """The factors of all adapters of one product, stacked by ranks, in the form that the kernels read."""

    # A, [E, R, in] or its terms.
    a: Tensor
    # The terms of s B^T, [terms, E, R, out].
    b: Tensor


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


def _adapters(p: Tensor | None, up: _Factors | None, down: _Factors | None) -> ActivationAdapters:
    """Return what the kernels of the activation read."""
    return ActivationAdapters(p, None if up is None else up.b, None if down is None else down.a)


def _forward(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing, kind: str, transposed: bool,
    up_factors: _Factors | None, down_factors: _Factors | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y [T, H], h [S, 2 I] or [S, I], and the terms of p and w q [S, 2, R], which are None without adapters.

    If the adapter is fused with the activation, h does not contain it.
    """
    p = q = wq = None
    h = grouped_product(spread(x, routing), up if transposed else up.mT, routing.ends)
    if up_factors is not None:
        p, _ = grouped_project(x, up_factors.a, routing, gathers=True)
    if _is_fused(up_factors, down_factors):
        a, q, wq = lora_activation_forward(h, _adapters(p, up_factors, down_factors), weights, routing, kind)
    else:
        if up_factors is not None and p is not None:
            grouped_expand(p, up_factors.b, h, routing)
        a = ACTIVATIONS[kind][0](h)
        if down_factors is not None:
            q, wq = grouped_project(a, down_factors.a, routing, False, weights)
    z = grouped_product(a, down if transposed else down.mT, routing.ends)
    del a
    if down_factors is not None and q is not None:
        grouped_expand(q, down_factors.b, z, routing)
    return combine(z, weights, routing, x.dtype), h, p, wq


class _Operand(NamedTuple):
    """The factors of a sum over the rows of each expert."""

    # [S, N], or [T, N] if `gathers` is True.
    z: Tensor | None
    # The terms of the low-rank products, [S, 2, R].
    h: Tensor | None
    gathers: bool = False

    def sums(self, column: int, like: Tensor, routing: Routing, factor: float = 1.0) -> Tensor:
        """Return the sums for the columns of one adapter, in the dtype and with the strides of `like` [E, r, N]."""
        assert self.z is not None
        assert self.h is not None
        # `empty_like` keeps the order of the strides, so the gradient of PEFT's B is a view of a tensor [out, r E].
        out = torch.empty_like(like)
        return grouped_sums(self.z, self.h, column, out, routing, self.gathers, factor)


def _factor_gradients(
    adapters: Sequence[ExpertAdapter], needs: Sequence[ExpertAdapter], inputs: _Operand, outputs: _Operand,
    routing: Routing,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of A and B of each adapter of one product.

    Args:
        adapters: The adapters of the product.
        needs: The adapters with flags in place of their tensors.
        inputs: The input of the product and the gradients of its low-rank products.
        outputs: The upstream gradient and the low-rank products.
        routing: The rows of each expert.
    """
    gradients: list[Tensor | None] = []
    column = 0
    for adapter, need in zip(adapters, needs, strict=True):
        gradients.append(inputs.sums(column, adapter.a, routing) if need.a else None)
        gradients.append(outputs.sums(column, adapter.b.mT, routing, adapter.scaling).mT if need.b else None)
        column += adapter.a.shape[1]
    return gradients


class _LoRAExperts(torch.autograd.Function):
    """Compute y from x, the weights of the router, and the factors A and B of the adapters of both products.

    `scalings` holds one tuple for the first product and one for the second one, and `factors` holds A and B in turn.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing, kind: str, transposed: bool,
        scalings: tuple[tuple[float, ...], tuple[float, ...]], *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        x, weights = _rows(x), weights.contiguous()
        up_adapters, down_adapters = _rebuild(factors, scalings)
        terms_of_b = TERMS[x.dtype]
        y, h, p, wq = _forward(
            x, weights, up, down, routing, kind, transposed,
            _split(up_adapters, terms_of_b), _split(down_adapters, terms_of_b),
        )  # fmt: skip
        ctx.save_for_backward(x, weights, up, down, h, p, wq, *routing, *factors)
        ctx.kind, ctx.transposed, ctx.scalings = kind, transposed, scalings
        return y

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, up, down, h, p, wq, slot, order, expert, ends, *factors = ctx.saved_tensors
        routing, transposed, dy = Routing(slot, order, expert, ends), ctx.transposed, _rows(dy)
        up_adapters, down_adapters = _rebuild(factors, ctx.scalings)
        up_needs, down_needs = _rebuild(ctx.needs_input_grad[8:], ctx.scalings)
        needs_x, needs_weights = ctx.needs_input_grad[:2]
        needs_dh = needs_x or any(need.a or need.b for need in up_needs)
        needs_wa = any(need.a for need in down_needs)
        needs_dp = bool(up_adapters) and (needs_x or any(need.a for need in up_needs))
        da = dq = dp = dh = wa = dweights = dx = None

        up_factors, down_factors = _split(up_adapters), _split(down_adapters)
        is_fused = _is_fused(up_factors, down_factors)
        if down_factors is not None and (needs_dh or needs_weights or needs_wa):
            dq, _ = grouped_project(dy, down_factors.b, routing, gathers=True)
        if needs_dh or needs_weights:
            da = grouped_product(spread(dy, routing), down.mT if transposed else down, ends)
        if is_fused and (da is not None or needs_wa):
            needs = NeededActivationGradients(needs_dh, needs_wa, needs_weights, needs_dp)
            adapters = _adapters(p, up_factors, down_factors)
            dh, wa, dweights, dp = lora_activation_backward(
                h, da, adapters, None if da is None else dq, weights, routing, ctx.kind, needs
            )
        elif da is not None or needs_wa:
            if down_factors is not None and da is not None and dq is not None:
                grouped_expand(dq, down_factors.a, da, routing)
            dh, wa, dweights = activation_gradients(
                h, da, weights, routing, ctx.kind, needs_dh, needs_wa, needs_weights
            )
            if up_factors is not None and dh is not None and needs_dp:
                dp, _ = grouped_project(dh, up_factors.b, routing, gathers=False)
        del da, down_factors
        down_gradients = _factor_gradients(down_adapters, down_needs, _Operand(wa, dq), _Operand(dy, wq, True), routing)
        del wa
        up_gradients = _factor_gradients(up_adapters, up_needs, _Operand(x, dp, True), _Operand(dh, p), routing)
        if needs_x:
            assert dh is not None
            rows = grouped_product(dh, up.mT if transposed else up, ends)
            del dh
            if up_factors is not None and dp is not None:
                grouped_expand(dp, up_factors.a, rows, routing)
            dx = combine(rows, None, routing, dy.dtype)
        return dx, dweights, *(None,) * 6, *up_gradients, *down_gradients


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


# --- products that autograd differentiates ---------------------------------------------------------


class _AddGroupedAdapters(torch.autograd.Function):
    """Add the low-rank products of sorted rows x [S, N] to y [S, M], the product with the weights, in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, routing: Routing, scalings: tuple[float, ...], *factors: Tensor
    ) -> Tensor:
        (adapters, _), x = _rebuild(factors, (scalings, ())), _rows(x)
        terms = _split(adapters)
        assert terms is not None
        p, _ = grouped_project(x, terms.a, routing, gathers=False)
        grouped_expand(p, terms.b, y, routing)
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, p, *routing, *factors)
        ctx.scalings = scalings
        return y

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, p, slot, order, expert, ends, *factors = ctx.saved_tensors
        routing, rows = Routing(slot, order, expert, ends), _rows(dy)
        (adapters, _), (needs, _) = (_rebuild(f, (ctx.scalings, ())) for f in (factors, ctx.needs_input_grad[4:]))
        terms = _split(adapters)
        assert terms is not None
        dp, _ = grouped_project(rows, terms.b, routing, gathers=False)
        gradients = _factor_gradients(adapters, needs, _Operand(x, dp), _Operand(rows, p), routing)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(x)
            grouped_expand(dp, terms.a, dx, routing)
        return dx, dy, None, None, *gradients


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[ExpertAdapter], routing: Routing,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """Return the product of each row with the weight of its expert, plus bias and adapters, in the dtype of x."""
    y = grouped_linear(x, weight if transposed else weight.mT, routing.ends)
    if bias is not None:
        y = y.add_(rows_of_groups(bias, routing.group, routing.ends))
    if not adapters:
        return y
    factors = [tensor for adapter in adapters for tensor in (adapter.a, adapter.b)]
    if _takes_kernels(x, [x, *factors]):
        return _AddGroupedAdapters.apply(x, y, routing, tuple(adapter.scaling for adapter in adapters), *factors)
    total = y
    for adapter in adapters:
        sum_dtype = torch.promote_types(x.dtype, adapter.a.dtype)
        # `grouped_mm` needs dense factors, and the experts of PEFT's B are adjacent in memory.
        a, b = adapter.a.to(sum_dtype).contiguous().mT, (adapter.b.to(sum_dtype) * adapter.scaling).mT.contiguous()
        total = total + grouped_linear(grouped_linear(x.to(sum_dtype), a, routing.ends), b, routing.ends)
    return total.to(y.dtype)


def _takes_kernels(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether the low-rank kernels support x and the other tensors."""
    if torch.compiler.is_compiling() or has_active_transform():
        return False
    if any(type(tensor) not in PLAIN or tensor.numel() == 0 for tensor in tensors):
        return False
    return x.dtype in (torch.bfloat16, torch.float16) and runs_kernels(x, *tensors)


def _takes_node(x: Tensor, tensors: Sequence[Tensor], parameters: ExpertParameters, activation: object) -> bool:
    """Return whether the node computes these experts: kernels run, and the weights are frozen and have no bias."""
    up, down, *biases = parameters
    is_frozen = not torch.is_grad_enabled() or not (up.requires_grad or down.requires_grad)
    has_bias = any(bias is not None for bias in biases)
    return (
        is_frozen
        and not has_bias
        and isinstance(activation, str)
        and x.dtype == up.dtype
        and _takes_kernels(x, tensors)
    )


def adapted_moe_mlp(
    x: Tensor,
    parameters: ExpertParameters,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_adapters: Sequence[ExpertAdapter],
    down_adapters: Sequence[ExpertAdapter],
    activation: str | Callable[[Tensor], Tensor],
    transposed: bool,
    op: str = "moe_mlp",
) -> Tensor:
    """Return `moe_mlp` with any number of adapters on each product.

    The arguments are not checked, except for the result of an activation that is a function. The error names `op`.
    """
    routing = route(top_k_index, len(parameters.up))
    factors = [tensor for adapter in (*up_adapters, *down_adapters) for tensor in (adapter.a, adapter.b)]
    up, down, up_bias, down_bias = parameters
    if _takes_node(x, [x, up, down, top_k_weights, *factors], parameters, activation):
        scalings = tuple(tuple(adapter.scaling for adapter in each) for each in (up_adapters, down_adapters))
        return _LoRAExperts.apply(x, top_k_weights, up, down, routing, activation, transposed, scalings, *factors)
    h = _product(spread(x, routing, up.dtype), up, up_bias, up_adapters, routing, transposed)
    if isinstance(activation, str):
        h = ACTIVATIONS[activation][0](h)
    else:
        h = check_activated(op, activation(h), (len(h), down.shape[1 if transposed else 2])).to(down.dtype)
    h = _product(h, down, down_bias, down_adapters, routing, transposed)
    return combine(h, top_k_weights, routing, x.dtype)


# --- public --------------------------------------------------------------------------------------


def lora_moe_mlp(
    x: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    up_scaling: float = 1.0,
    down_scaling: float = 1.0,
    *,
    transposed: bool = False,
    activation: str | Callable[[Tensor], Tensor] = "silu",
) -> Tensor:
    """Return `moe_mlp` with a low-rank adapter on each of the two products of every expert.

    All tensors but the indices get gradients. If the weights of the experts are frozen, backward computes no gradient
    of them, and no tensor of their size. The op then saves `x`, the result of the first product, [T K, 2 I], and the
    low-rank products, [T K, r]. The factors are as accurate as two bf16 values for each, where PEFT's code rounds them
    to the dtype of the weights.

    Args:
        x: [T, H], fp32 | bf16 | fp16.
        up_proj, down_proj, top_k_index, top_k_weights, transposed, activation: As in `moe_mlp`.
        up_a: [E, r, H], fp32 | bf16 | fp16. Its dtype may differ from that of the weights, and its strides are any.
        up_b: [E, 2 I, r], or [E, I, r] for an activation without a gate, in the dtype of `up_a`.
        down_a: [E, r, I].
        down_b: [E, H, r], in the dtype of `down_a`.
        up_scaling: The factor of the first adapter: alpha / r, or alpha / sqrt(r) if it is rank-stabilised.
        down_scaling: The factor of the second adapter.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        TypeError: A tensor argument is not a floating-point tensor, a factor is not a number, or `activation` is
            neither a str nor a function.
        ValueError: Shapes do not fit, dtypes or devices differ, or `activation` is unknown.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Shazeer et al., arXiv:1701.06538.

    Example:
        >>> x, up, down = torch.randn(5, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
        >>> weights, index = torch.rand(5, 4).topk(2)
        >>> up_a, up_b, down_a, down_b = (torch.randn(4, *shape) for shape in ((2, 8), (32, 2), (2, 16), (8, 2)))
        >>> tigon.lora_moe_mlp(x, up, down, index, weights, up_a, up_b, down_a, down_b, 0.5, 0.5).shape
        torch.Size([5, 8])
    """
    op = "lora_moe_mlp"
    factors = {"up_a": up_a, "up_b": up_b, "down_a": down_a, "down_b": down_b}
    checks.tensor(op, **factors)
    checks.floating(op, **factors)
    parameters = ExpertParameters(up_proj, down_proj, None, None)
    sizes = check_experts(op, x, parameters, top_k_index, top_k_weights, transposed, activation)
    for name, inputs, outputs in (("up", sizes.hidden, sizes.width), ("down", sizes.inner, sizes.hidden)):
        a, b = factors[f"{name}_a"], factors[f"{name}_b"]
        if a.dim() != 3:
            raise ValueError(f"{op}: {name}_a must have shape [E, r, {inputs}], got {tuple(a.shape)}")
        checks.shape(op, f"{name}_a", a, (sizes.experts, a.shape[1], inputs))
        checks.shape(op, f"{name}_b", b, (sizes.experts, outputs, a.shape[1]))
        checks.same(op, "dtype", **{f"{name}_a": a, f"{name}_b": b})
    checks.same(op, "device", x=x, **factors)
    up = ExpertAdapter(up_a, up_b, checks.number(op, "up_scaling", up_scaling))
    down = ExpertAdapter(down_a, down_b, checks.number(op, "down_scaling", down_scaling))
    return adapted_moe_mlp(x, parameters, top_k_index, top_k_weights, (up,), (down,), activation, transposed, op)
