r"""The activation of experts whose products have low-rank adapters, forward and backward, in one pass each.

    h'[s] = h[s] + p[s] B_u                                  h is the base product, and B_u contains the scaling
    a[s] = act(h'[s]),  q[s] = a[s] A_d^T,  (w q)[s]         the activation may have a gate: h' = [gate | up]

    da'[s] = da[s] + dq[s] A_d                               da is the gradient through the base product
    dh[s] = w da'[s] act'(h'[s]),  dp[s] = dh[s] B_u^T
    (w a)[s],  dw = <da'[s], a[s]>                           as in `tigon.ops.experts.activation`

Separate kernels for the adapters would read and write [S, 2 I] and [S, I] once more, and would read the results of the
activation again for q and dp. The forward saves h without its adapter. Both directions add the adapter in fp32 and do
not round the sum. In bf16, p B_u and dq A_d are products of the first bf16 terms, because eager code rounds h' and da'
to bf16. q and dp are sums over features, and use two terms of A_d and B_u.

A program computes a tile of the rows of one expert, and loops over the features. Rows that belong to no expert of this
rank are neither read nor written, and their dw is 0.

Shapes: T tokens, K choices each, S = T K rows sorted by expert, E experts, I intermediate, R_u and R_d ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.grouped_low_rank import GroupedLowRankConfig, count_terms, empty_grouped_hidden
from tigon.ops.adapters.grouped_low_rank_kernels import (
    add_expanded,
    add_projected,
    find_rows,
    load_factor,
    load_hidden,
    store_hidden,
)
from tigon.ops.adapters.low_rank import TERMS, rank_block
from tigon.ops.experts.activation import NeededActivationGradients
from tigon.ops.experts.choice_order import Routing
from tigon.ops.mlps.activation_kernels import activation_and_slope
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of
from tigon.runtime.launch import in_order, launch, on_device

# A program holds all ranks of both adapters. With rank 32, a thread of the backward needs 184 registers on sm_90.
LARGEST_FUSED_RANK = 32


@triton.jit
def _separate(x, IS_NVIDIA: tl.constexpr):
    """Return x, in bf16 or fp16, by a copy that keeps the compiler from computing x twice. A product needs x in another
    layout of registers than the store of x. On NVIDIA, Triton would convert the operands of x to the layout of the
    product when they are loaded, and would then compute x in both layouts. It does not move a conversion across inline
    assembly, so behind this copy it converts x itself."""
    if IS_NVIDIA:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit(do_not_specialize=["E"])
def _lora_expert_forward_kernel(
    h_ptr, a_ptr, p_ptr, up_b_ptr,  # [S, 2 I] or [S, I], [S, I], [S, 2, R_u] or None, [E, R_u, 2 I]
    down_a_ptr, q_ptr, wq_ptr, order_ptr, weights_ptr, ends_ptr,  # [E, R_d, I] or None, [S, 2, R_d], [S], [T, K], [E]
    E, N, stride_h, stride_b_term, stride_a_term,
    UP_R: tl.constexpr, DOWN_R: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    B_TERMS: tl.constexpr, B_IS_SPLIT: tl.constexpr, A_TERMS: tl.constexpr, A_IS_SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Write a, q and w q for a tile of the rows of one expert."""
    expert, first, end = find_rows(ends_ptr, tl.program_id(0), E, BLOCK_T, BLOCK_E)
    if expert >= E:
        return
    rows = first + tl.arange(0, BLOCK_T)[:, None]
    steps = tl.arange(0, BLOCK_N)[None, :]
    ranks = tl.arange(0, BLOCK_R)
    halves: tl.constexpr = 1 if KIND == "relu2" else 2
    if p_ptr is not None:
        p, p2 = load_hidden(p_ptr, rows, end, ranks[None, :], UP_R, ORDER)
        b_rows = (expert.to(tl.int64) * UP_R + ranks[:, None]) * (halves * N)
    down_rows = (expert.to(tl.int64) * DOWN_R + ranks[:, None]) * N
    q = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = start + steps
        inside = (rows < end) & (cols < N)
        gate = tl.load(h_ptr + rows * stride_h + cols, inside, 0.0).to(tl.float32)
        if halves == 2:
            up = tl.load(h_ptr + rows * stride_h + N + cols, inside, 0.0).to(tl.float32)
        if p_ptr is not None:
            b_mask = (ranks[:, None] < UP_R) & (cols < N)
            b, b2 = load_factor(up_b_ptr, b_rows + cols, stride_b_term, b_mask, B_TERMS, B_IS_SPLIT)
            gate = add_expanded(gate, p, p2, b, b2, ORDER, B_TERMS)
            if halves == 2:
                b, b2 = load_factor(up_b_ptr, b_rows + N + cols, stride_b_term, b_mask, B_TERMS, B_IS_SPLIT)
                up = add_expanded(up, p, p2, b, b2, ORDER, B_TERMS)
        a, _ = activation_and_slope(gate, KIND)
        if halves == 2:
            a *= up
        a = a.to(a_ptr.dtype.element_ty)
        tl.store(a_ptr + rows * N + cols, a, inside)
        if down_a_ptr is not None:
            a_mask = (ranks[:, None] < DOWN_R) & (cols < N)
            down_a, down_a2 = load_factor(down_a_ptr, down_rows + cols, stride_a_term, a_mask, A_TERMS, A_IS_SPLIT)
            q = add_projected(q, _separate(a, IS_NVIDIA), down_a, down_a2, ORDER, A_TERMS)
    if down_a_ptr is not None:
        weights = tl.load(weights_ptr + tl.load(order_ptr + rows, rows < end, 0), rows < end, 0.0).to(tl.float32)
        store_hidden(q, q_ptr, rows, end, ranks[None, :], DOWN_R)
        store_hidden(q * weights, wq_ptr, rows, end, ranks[None, :], DOWN_R)


@triton.jit(do_not_specialize=["E"])
def _lora_expert_backward_kernel(
    h_ptr, da_ptr, p_ptr, up_b_ptr,  # [S, 2 I] or [S, I], [S, I] or None, [S, 2, R_u] or None, [E, R_u, 2 I]
    dq_ptr, down_a_ptr, order_ptr, weights_ptr, ends_ptr,  # [S, 2, R_d] or None, [E, R_d, I], [S], [T, K], [E]
    dh_ptr, wa_ptr, dweights_ptr, dp_ptr,  # [S, 2 I] or [S, I], [S, I], [T, K], [S, 2, R_u]; None if not needed
    E, N, stride_h, stride_da, stride_wa, stride_b_term, stride_a_term,
    UP_R: tl.constexpr, DOWN_R: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    B_TERMS: tl.constexpr, B_IS_SPLIT: tl.constexpr, A_TERMS: tl.constexpr, A_IS_SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Write dh, w a, dw and dp, each if it is needed, for a tile of the rows of one expert. w a may be stored in the
    memory of da, because a tile is read before it is written."""
    expert, first, end = find_rows(ends_ptr, tl.program_id(0), E, BLOCK_T, BLOCK_E)
    if expert >= E:
        return
    rows = first + tl.arange(0, BLOCK_T)[:, None]
    steps = tl.arange(0, BLOCK_N)[None, :]
    ranks = tl.arange(0, BLOCK_R)
    halves: tl.constexpr = 1 if KIND == "relu2" else 2
    choices = tl.load(order_ptr + rows, rows < end, 0)
    weights = tl.load(weights_ptr + choices, rows < end, 0.0).to(tl.float32)
    if p_ptr is not None:
        p, p2 = load_hidden(p_ptr, rows, end, ranks[None, :], UP_R, ORDER)
    if up_b_ptr is not None:
        b_rows = (expert.to(tl.int64) * UP_R + ranks[:, None]) * (halves * N)
    if dq_ptr is not None:
        dq, dq2 = load_hidden(dq_ptr, rows, end, ranks[None, :], DOWN_R, ORDER)
        down_rows = (expert.to(tl.int64) * DOWN_R + ranks[:, None]) * N
    dp = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    dots = tl.zeros([BLOCK_T, 1], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = start + steps
        inside = (rows < end) & (cols < N)
        gate = tl.load(h_ptr + rows * stride_h + cols, inside, 0.0).to(tl.float32)
        if halves == 2:
            up = tl.load(h_ptr + rows * stride_h + N + cols, inside, 0.0).to(tl.float32)
        if da_ptr is not None:
            da = tl.load(da_ptr + rows * stride_da + cols, inside, 0.0).to(tl.float32)
        if up_b_ptr is not None:
            b_mask = (ranks[:, None] < UP_R) & (cols < N)
            gate_b, gate_b2 = load_factor(up_b_ptr, b_rows + cols, stride_b_term, b_mask, B_TERMS, B_IS_SPLIT)
            if halves == 2:
                up_b, up_b2 = load_factor(up_b_ptr, b_rows + N + cols, stride_b_term, b_mask, B_TERMS, B_IS_SPLIT)
        if p_ptr is not None:
            gate = add_expanded(gate, p, p2, gate_b, gate_b2, ORDER, B_TERMS)
            if halves == 2:
                up = add_expanded(up, p, p2, up_b, up_b2, ORDER, B_TERMS)
        if dq_ptr is not None:
            a_mask = (ranks[:, None] < DOWN_R) & (cols < N)
            down_a, down_a2 = load_factor(down_a_ptr, down_rows + cols, stride_a_term, a_mask, A_TERMS, A_IS_SPLIT)
            da = add_expanded(da, dq, dq2, down_a, down_a2, ORDER, A_TERMS)
        act, slope = activation_and_slope(gate, KIND)
        a = act * up if halves == 2 else act
        if wa_ptr is not None:
            tl.store(wa_ptr + rows * stride_wa + cols, weights * a, inside)
        if dweights_ptr is not None:
            dots += tl.sum(da * a, 1, keep_dims=True)
        if dh_ptr is not None:
            dy = weights * da
            dh_rows = dh_ptr + rows * (halves * N)
            # The gradient of relu2 is 0 for gate <= 0, even if dy is NaN.
            dgate = dy * up * slope if halves == 2 else tl.where(gate <= 0.0, 0.0, dy * slope)
            dgate = dgate.to(dh_ptr.dtype.element_ty)
            tl.store(dh_rows + cols, dgate, inside)
            if dp_ptr is not None:
                dp = add_projected(dp, _separate(dgate, IS_NVIDIA), gate_b, gate_b2, ORDER, B_TERMS)
            if halves == 2:
                dup = (dy * act).to(dh_ptr.dtype.element_ty)
                tl.store(dh_rows + N + cols, dup, inside)
                if dp_ptr is not None:
                    dp = add_projected(dp, _separate(dup, IS_NVIDIA), up_b, up_b2, ORDER, B_TERMS)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + choices, dots, rows < end)
    if dp_ptr is not None:
        store_hidden(dp, dp_ptr, rows, end, ranks[None, :], UP_R)


class ActivationAdapters(NamedTuple):
    """The tensors of the adapters that the kernels read. Those of a product without an adapter are None."""

    # The terms of p [S, 2, R_u], or None if h contains p B_u already; and the factor s B_u^T [E, R_u, 2 I].
    p: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None  # The factor A_d [E, R_d, I]


def _constants(h: Tensor, adapters: ActivationAdapters, kind: str, ends: Tensor) -> dict[str, Any]:
    up_r, down_r = (0 if factor is None else factor.shape[-2] for factor in (adapters.up_b, adapters.down_a))
    problem = "activation", max(up_r, down_r), TERMS[h.dtype]
    config = GroupedLowRankConfig.choose(problem, device_of(h))
    up_terms, down_terms = (0 if f is None else count_terms(f) for f in (adapters.up_b, adapters.down_a))
    return {
        "UP_R": up_r,
        "DOWN_R": down_r,
        "KIND": kind,
        "ORDER": TERMS[h.dtype],
        "B_TERMS": up_terms,
        "B_IS_SPLIT": adapters.up_b is not None and adapters.up_b.dim() == 4,
        "A_TERMS": down_terms,
        "A_IS_SPLIT": adapters.down_a is not None and adapters.down_a.dim() == 4,
        "BLOCK_T": config.block_t,
        "BLOCK_N": config.block_n,
        "BLOCK_R": rank_block(max(up_r, down_r)),
        "BLOCK_E": triton.next_power_of_2(len(ends)),
        "STAGES": config.num_stages,
        "IS_NVIDIA": device_of(h).arch.startswith("sm_"),
        "num_warps": config.num_warps,
    }


def _strides_of_terms(adapters: ActivationAdapters) -> dict[str, int]:
    """Return the strides of the first dimension of the factors. The kernels use only those of terms."""
    b, a = adapters.up_b, adapters.down_a
    return {"stride_b_term": 0 if b is None else b.stride(0), "stride_a_term": 0 if a is None else a.stride(0)}


@on_device
def lora_activation_forward(
    h: Tensor, adapters: ActivationAdapters, weights: Tensor, routing: Routing, kind: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a [S, I] and the terms of q and w q [S, 2, R_d], which are None without an adapter on the second product.
    h is the base product [S, 2 I], or [S, I] for an activation without a gate, with dense rows. The weights [T, K] are
    contiguous."""
    rows, width = h.shape
    inner = width // (1 if kind == "relu2" else 2)
    constants = _constants(h, adapters, kind, routing.ends)
    a, q, wq = h.new_empty(rows, inner), None, None
    if adapters.down_a is not None:
        q, wq = (empty_grouped_hidden(h, rows, adapters.down_a.shape[-2]) for _ in range(2))
    launch(
        _lora_expert_forward_kernel, cdiv(rows, constants["BLOCK_T"]) + len(routing.ends),
        *in_order(_lora_expert_forward_kernel)(
            h_ptr=h, a_ptr=a, p_ptr=adapters.p, up_b_ptr=adapters.up_b, down_a_ptr=adapters.down_a, q_ptr=q, wq_ptr=wq,
            order_ptr=routing.order, weights_ptr=weights, ends_ptr=routing.ends,
            E=len(routing.ends), N=inner, stride_h=h.stride(0), **_strides_of_terms(adapters),
        ),
        **constants,
    )  # fmt: skip
    return a, q, wq


class ActivationGradients(NamedTuple):
    """The results of the backward. A result that is not needed is None."""

    dh: Tensor | None  # [S, 2 I] or [S, I]
    wa: Tensor | None  # [S, I]
    dweights: Tensor | None  # [T, K]
    dp: Tensor | None  # the terms [S, 2, R_u]


@on_device
def lora_activation_backward(
    h: Tensor, da: Tensor | None, adapters: ActivationAdapters, dq: Tensor | None, weights: Tensor, routing: Routing,
    kind: str, needs: NeededActivationGradients,
) -> ActivationGradients:  # fmt: skip
    """Return the gradients of which `needs` is True. All but w a need `da`. `da` is the gradient of `a` through the
    base product, [S, I] with dense rows; w a may overwrite it. `dq` holds the terms of the gradient of q [S, 2, R_d],
    or is None if the second product has no adapter or da is None."""
    rows, width = h.shape
    inner = width // (1 if kind == "relu2" else 2)
    constants = _constants(h, adapters, kind, routing.ends)
    dh = h.new_empty(rows, width) if needs.dh else None
    wa = (h.new_empty(rows, inner) if da is None else da) if needs.wa else None
    # The rows of experts of other ranks are not visited, and their weights have a gradient of 0.
    dweights = torch.zeros_like(weights) if needs.dweights else None
    dp = empty_grouped_hidden(h, rows, constants["UP_R"]) if needs.dp else None
    launch(
        _lora_expert_backward_kernel, cdiv(rows, constants["BLOCK_T"]) + len(routing.ends),
        *in_order(_lora_expert_backward_kernel)(
            h_ptr=h, da_ptr=da, p_ptr=adapters.p, up_b_ptr=adapters.up_b, dq_ptr=dq,
            down_a_ptr=None if dq is None else adapters.down_a, order_ptr=routing.order, weights_ptr=weights,
            ends_ptr=routing.ends, dh_ptr=dh, wa_ptr=wa, dweights_ptr=dweights, dp_ptr=dp,
            E=len(routing.ends), N=inner, stride_h=h.stride(0), stride_da=0 if da is None else da.stride(0),
            stride_wa=0 if wa is None else wa.stride(0), **_strides_of_terms(adapters),
        ),
        **constants,
    )  # fmt: skip
    return ActivationGradients(dh, wa, dweights, dp)
