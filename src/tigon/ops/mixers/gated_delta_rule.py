r"""The gated delta rule (Yang et al., arXiv 2412.06464): linear attention whose state forgets and overwrites.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    o_t = scale S_t^T q_t

Every head of v has a state S [Dk, Dv] in fp32. Neighbouring heads of v may share a head of q and k. With
`use_qk_l2norm`, q and k are divided by sqrt(sum of squares + 1e-6) first.

The op computes 64 tokens at a time: in bf16 and fp16 on a GPU by the kernels of `delta_rule_launchers`, in fp32 and
fp64 and elsewhere by `delta_rule_chunks`, which has the formulas. Forward saves its inputs, and backward recomputes the
states.

Shapes: B batch, T tokens, Hk heads of q and k, Hv heads of v, Dk and Dv features of a head, N packed samples.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tigon.ops.mixers.chunks import check_bounds
from tigon.ops.mixers.delta_rule_chunks import (
    NORM_EPS,
    DeltaInputs,
    DeltaOptions,
    chunked_backward,
    chunked_forward,
    count_samples,
    state_dtype,
)
from tigon.ops.mixers.delta_rule_config import fits_kernels
from tigon.ops.mixers.delta_rule_launchers import (
    NeededDeltaGradients,
    delta_rule_backward,
    delta_rule_forward,
)
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.op import Node

_OP = "gated_delta_rule"


# --- reference -----------------------------------------------------------------------------------


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `gated_delta_rule` token by token in eager torch, for tests. On the CPU, a g above 0 is refused."""
    inputs = DeltaInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    return compute_by_token(_OP, inputs, scale, output_final_state, use_qk_l2norm)


def compute_by_token(
    op: str, inputs: DeltaInputs, scale: float | None, output_final_state: bool, use_qk_l2norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule token by token. g [B, T, Hv, Dk] has a decay of each feature, g [B, T, Hv] one for all."""
    q, k, v, g, beta, initial_state, cu_seqlens = inputs
    _refuse_growth(op, g)
    dtype, groups = state_dtype(inputs), v.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shape = count_samples(inputs), v.shape[2], k.shape[3], v.shape[3]
    states = q.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, values, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    g = g[..., None] if g.dim() == 3 else g
    if use_qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    outputs, last_states = [values[:, :0]], [states[:0]]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = states if cu_seqlens is None else states[i : i + 1]
        for t in range(start, end):
            state = g[:, t, :, :, None].exp() * state
            update = beta[:, t, :, None] * (values[:, t] - (k[:, t, :, :, None] * state).sum(2))
            state = state + k[:, t, :, :, None] * update[:, :, None]
            outputs.append(scale * (q[:, t, :, :, None] * state).sum(2)[:, None])
        last_states.append(state)
    return torch.cat(outputs, 1).to(v.dtype), torch.cat(last_states) if output_final_state else None


# --- autograd ------------------------------------------------------------------------------------


class _DeltaRule(Node):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        keep_none_gradients(ctx)
        *tensors, options = arguments
        inputs = DeltaInputs(*tensors)
        ctx.options, ctx.runs_kernels = options, runs_kernels(*inputs[:6]) and fits_kernels(inputs)
        if ctx.runs_kernels:
            o, last_state = delta_rule_forward(inputs.q, inputs, options)
        else:
            o, last_state = chunked_forward(inputs, options)
        ctx.save_for_backward(*inputs)
        return (o, last_state) if options.returns_state else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlast_state: Tensor | None = None) -> tuple[Tensor | None, ...]:
        inputs = DeltaInputs(*ctx.saved_tensors)
        do = torch.zeros_like(inputs.v) if do is None else do
        if not ctx.runs_kernels:
            return tuple(chunked_backward(do, dlast_state, inputs, ctx.options))
        needs_dq, needs_dk, _, needs_dg, needs_dbeta, needs_dinitial = ctx.needs_input_grad[:6]
        needs = NeededDeltaGradients(needs_dq or needs_dk or needs_dg or needs_dbeta, needs_dinitial)
        return tuple(delta_rule_backward(do, dlast_state, inputs, ctx.options, needs))


# --- checks --------------------------------------------------------------------------------------


def _refuse_growth(op: str, g: Tensor) -> None:
    """Raise a ValueError if an element of g on the CPU is above 0. Reading g on a GPU would wait for it."""
    if type(g) in PLAIN and g.device.type == "cpu" and not torch.compiler.is_compiling() and bool((g > 0).any()):
        raise ValueError(f"{op}: g must not be above 0, because a state must not grow, got {g.max().item():g}")


def _check(op: str, inputs: DeltaInputs, has_feature_decay: bool) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens = inputs
    checks.tensor(op, q=q, k=k, v=v, g=g, beta=beta)
    checks.floating(op, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 or not (x.shape[2] and x.shape[3]):
            raise ValueError(f"{op}: {name} must have shape (B, T, H, D) with H, D > 0, got {tuple(x.shape)}")
    checks.shape(op, "k", k, q.shape)
    heads, size = v.shape[2:]
    checks.shape(op, "v", v, (*q.shape[:2], heads, size))
    if heads % q.shape[2]:
        raise ValueError(f"{op}: the {q.shape[2]} heads of q and k must divide the heads of v, got {heads}")
    checks.shape(op, "g", g, (*v.shape[:3], q.shape[3]) if has_feature_decay else v.shape[:3])
    checks.shape(op, "beta", beta, v.shape[:3])
    checks.same(op, "dtype", q=q, k=k, v=v)
    checks.same(op, "device", **{name: x for name, x in inputs._asdict().items() if isinstance(x, Tensor)})
    if cu_seqlens is not None:
        check_bounds(op, cu_seqlens, q.shape[1])
        if q.shape[0] != 1:
            raise ValueError(f"{op}: packed samples must be one sequence, B = 1, got B = {q.shape[0]}")
    if initial_state is not None:
        checks.shape(op, "initial_state", initial_state, (count_samples(inputs), heads, q.shape[3], size))


# --- public --------------------------------------------------------------------------------------


def compute_rule(
    op: str, inputs: DeltaInputs, scale: float | None, output_final_state: bool, use_qk_l2norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments of `op`, "kda" or "gated_delta_rule", and compute it."""
    _check(op, inputs, has_feature_decay=op != _OP)
    checks.flag(op, output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm)
    scale = inputs.q.shape[3] ** -0.5 if scale is None else checks.number(op, "scale", scale)
    _refuse_growth(op, inputs.g)
    result = _DeltaRule.apply(*inputs, DeltaOptions(scale, use_qk_l2norm, output_final_state))
    return result if output_final_state else (result, None)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule, a linear recurrence over tokens. All floating-point tensors get gradients.

    Args:
        q: [B, T, Hk, Dk], fp32 | bf16 | fp16, any strides.
        k: [B, T, Hk, Dk].
        v: [B, T, Hv, Dv], where Hk divides Hv. Head h of v reads head h // (Hv / Hk) of q and k.
        g: [B, T, Hv], the logarithm of the decay. No element may be above 0. This is checked on the CPU only, because
            reading g on a GPU would wait for it; there, a g above 0 lets the state grow and may overflow.
        beta: [B, T, Hv], how far each token overwrites what the state predicts, usually in [0, 1].
        scale: The factor of q, by default Dk ** -0.5.
        initial_state: [B, Hv, Dk, Dv], or [N, Hv, Dk, Dv] for packed samples: the states before the first tokens. None
            stands for zeros.
        output_final_state: True to return the states after the last tokens.
        use_qk_l2norm: True to divide each row of q and of k by sqrt(sum of squares + 1e-6).
        cu_seqlens: [N + 1], int64 | int32, ascending from 0 to T: the bounds of N packed samples. B must be 1. Outputs
            and gradients are those of separate calls, bit for bit. The values are checked on the CPU only; on a GPU,
            all results are NaN if they do not ascend from 0 to T.

    Returns:
        o [B, T, Hv, Dv] in `v.dtype`, and the states after the last tokens, [B or N, Hv, Dk, Dv] in fp32, or None.

    Raises:
        TypeError: A tensor is not a floating-point tensor, `cu_seqlens` is not a tensor of integers, or an option has
            another type.
        ValueError: Shapes, dtypes or devices do not agree, Hk does not divide Hv, an element of `g` on the CPU is above
            0, or `cu_seqlens` on the CPU does not ascend from 0 to T.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464.

    Example:
        >>> q, k, v = torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 4, 64)
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, state = tigon.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 64, 64]))
    """
    inputs = DeltaInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    return compute_rule(_OP, inputs, scale, output_final_state, use_qk_l2norm)
