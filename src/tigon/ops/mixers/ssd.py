r"""The state space dual (SSD) of Mamba-2 (Dao and Gu, arXiv 2405.21060): linear attention whose state forgets.

    s_t = clamp(softplus(dt_t + dt_bias)),   S_t = exp(A s_t) S_{t-1} + s_t x_t B_t^T
    y_t = (S_t C_t + D x_t) * silu(z_t)

Every head of x has a state S [P, N] in fp32. Neighbouring heads may share a group of B and C.

The op computes 64 tokens at a time: in bf16 and fp16 on a GPU by the kernels of `ssd_launchers`, in fp32 and fp64 and
elsewhere by `ssd_chunks`, which has the formulas. Forward saves its inputs, and backward recomputes the states.
`swiglu` computes the gate z.

Shapes: B batch, T tokens, H heads of P features, K groups of B and C with N features, M packed samples.
"""

import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.mixers.chunks import check_bounds, samples_of
from tigon.ops.mixers.ssd_chunks import (
    SSDInputs,
    SSDOptions,
    chunked_backward,
    chunked_forward,
    compute_steps,
    state_dtype,
)
from tigon.ops.mixers.ssd_config import fits_kernels
from tigon.ops.mixers.ssd_launchers import ssd_backward, ssd_forward
from tigon.ops.mlps.glu import swiglu
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.op import Node

_OP = "ssd"


# --- reference -----------------------------------------------------------------------------------


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `ssd` token by token in eager torch, for tests. An element of A above 0 is refused."""
    _refuse_growth(A)
    inputs = SSDInputs(x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens)
    dtype, groups = state_dtype(inputs), x.shape[2] // B.shape[2]
    bias = None if dt_bias is None else dt_bias.to(dtype)
    steps = compute_steps(dt.to(dtype), bias, SSDOptions(dt_softplus, *dt_limit, return_final_states))
    shape = samples_of(x, cu_seqlens), *x.shape[2:], B.shape[3]
    states = x.new_zeros(shape, dtype=dtype) if initial_states is None else initial_states.to(dtype)
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    values, decays = steps[..., None] * x.to(dtype), (A.to(dtype) * steps).exp()
    B, C = (y.to(dtype).repeat_interleave(groups, 2) for y in (B, C))
    outputs, last_states = [values[:, :0]], [states[:0]]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = states if cu_seqlens is None else states[i : i + 1]
        for t in range(start, end):
            state = decays[:, t, :, None, None] * state + values[:, t, :, :, None] * B[:, t, :, None]
            outputs.append((state * C[:, t, :, None]).sum(-1)[:, None])
        last_states.append(state)
    y = torch.cat(outputs, 1)
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]).to(dtype) * x.to(dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return (y.to(x.dtype), torch.cat(last_states)) if return_final_states else y.to(x.dtype)


# --- autograd ------------------------------------------------------------------------------------


class _SSD(Node):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        keep_none_gradients(ctx)
        *tensors, options = arguments
        inputs = SSDInputs(*tensors)
        ctx.options, ctx.runs_kernels = options, runs_kernels(*inputs[:8]) and fits_kernels(inputs)
        compute = chunked_forward if not ctx.runs_kernels else functools.partial(ssd_forward, inputs.x)
        y, last_states = compute(inputs, options)
        ctx.save_for_backward(*inputs)
        return (y, last_states) if options.returns_states else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast_states: Tensor | None = None) -> tuple[Tensor | None, ...]:
        inputs = SSDInputs(*ctx.saved_tensors)
        dy = torch.zeros_like(inputs.x) if dy is None else dy
        compute = ssd_backward if ctx.runs_kernels else chunked_backward
        return tuple(compute(dy, dlast_states, inputs, ctx.options))


# --- checks --------------------------------------------------------------------------------------


def _refuse_growth(A: Tensor) -> None:
    """Raise a ValueError if an element of A on the CPU is above 0. Reading A on a GPU would wait for it."""
    if type(A) in PLAIN and A.device.type == "cpu" and not torch.compiler.is_compiling() and bool((A > 0).any()):
        raise ValueError(f"{_OP}: A must not be above 0, because a state must not grow, got {A.max().item():g}")


def _check(inputs: SSDInputs, z: Tensor | None) -> None:
    x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens = inputs
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    checks.tensor(_OP, **tensors)
    checks.floating(_OP, **tensors, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    for name, y in (("x", x), ("B", B)):
        if y.dim() != 4 or not (y.shape[2] and y.shape[3]):
            features = "H, P" if name == "x" else "K, N"
            raise ValueError(f"{_OP}: {name} must have shape (B, T, {features}) > 0, got {tuple(y.shape)}")
    heads, size = x.shape[2:]
    groups, state_size = B.shape[2:]
    checks.shape(_OP, "dt", dt, x.shape[:3])
    checks.shape(_OP, "A", A, (heads,))
    checks.shape(_OP, "B", B, (*x.shape[:2], groups, state_size))
    checks.shape(_OP, "C", C, B.shape)
    if heads % groups:
        raise ValueError(f"{_OP}: the {groups} groups of B and C must divide the heads of x, got {heads}")
    if D is not None:
        checks.shape(_OP, "D", D, (heads, size) if D.dim() == 2 else (heads,))
    if z is not None:
        checks.shape(_OP, "z", z, x.shape)
    if dt_bias is not None:
        checks.shape(_OP, "dt_bias", dt_bias, (heads,))
    checks.same(_OP, "dtype", x=x, B=B, C=C, z=z)
    if cu_seqlens is not None:
        check_bounds(_OP, cu_seqlens, x.shape[1])
        if x.shape[0] != 1:
            raise ValueError(f"{_OP}: packed samples must be one sequence, B = 1, got B = {x.shape[0]}")
    checks.same(_OP, "device", **inputs._asdict(), z=z)
    if initial_states is not None:
        checks.shape(_OP, "initial_states", initial_states, (samples_of(x, cu_seqlens), heads, size, state_size))


def _check_limit(dt_limit: object) -> tuple[float, float]:
    """Return the two limits of a step; check that they ascend from 0 or above. The upper one may be infinite."""
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise TypeError(f"{_OP}: dt_limit must be two numbers, got {checks.format_value(dt_limit)}")
    low = checks.number(_OP, "dt_limit[0]", dt_limit[0], 0.0)
    is_unlimited = isinstance(dt_limit[1], float) and dt_limit[1] == math.inf
    high = math.inf if is_unlimited else checks.number(_OP, "dt_limit[1]", dt_limit[1], 0.0)
    if low > high:
        raise ValueError(f"{_OP}: dt_limit must ascend, got {checks.format_value(dt_limit)}")
    return low, high


# --- public --------------------------------------------------------------------------------------


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the state space dual of Mamba-2, a linear recurrence. All floating-point tensors get gradients.

    Args:
        x: [B, T, H, P], fp32 | bf16 | fp16, any strides. With fp16, results are infinite or NaN if an element of a
            state or of its gradient exceeds 65504.
        dt: [B, T, H], the steps of the tokens, of any floating-point dtype.
        A: [H], the rate of the decay. No element may be above 0. This is checked on the CPU only, because reading A on
            a GPU would wait for it; there, an A above 0 lets the state grow and may overflow.
        B: [B, T, K, N], where K divides H. Head h of x reads group h // (H / K) of B and C.
        C: [B, T, K, N].
        D: [H] or [H, P], the weight of x in the result.
        z: [B, T, H, P], a gate: silu(z) multiplies the result, which is rounded to `x.dtype` before.
        dt_bias: [H], which is added to dt.
        dt_softplus: True to take the softplus of the sum.
        dt_limit: The smallest and the largest step, which replace steps beyond them. The smallest is at least 0.
        chunk_size: The tokens of a chunk, for callers of mamba-ssm. The op ignores it, because it changes the rounding
            only: chunks have 64 tokens.
        initial_states: [B, H, P, N], or [M, H, P, N] for packed samples: the states before the first tokens. None
            stands for zeros.
        return_final_states: True to return the states after the last tokens too.
        cu_seqlens: [M + 1], int64 | int32, ascending from 0 to T: the bounds of M packed samples. B must be 1. Outputs
            and gradients of tensors with tokens are those of separate calls, without z bit for bit. The values are
            checked on the CPU only; on a GPU, all results are NaN if they do not ascend from 0 to T.

    Returns:
        y [B, T, H, P] in `x.dtype`, or y and the states after the last tokens, [B or M, H, P, N] in fp32, or in
        fp64 if another tensor than `initial_states` is.

    Raises:
        TypeError: A tensor is not a floating-point tensor, `cu_seqlens` is not a tensor of integers, or an option has
            another type.
        ValueError: Shapes, dtypes or devices do not agree, K does not divide H, an element of `A` on the CPU is above
            0, `dt_limit` does not ascend from 0 or above, or `cu_seqlens` on the CPU does not ascend from 0 to T.

    Source: Dao and Gu, "Transformers are SSMs", arXiv:2405.21060.

    Example:
        >>> x, dt, A = torch.randn(1, 100, 4, 64), torch.randn(1, 100, 4), -torch.rand(4)
        >>> B, C = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32)
        >>> y, states = tigon.ssd(x, dt, A, B, C, dt_softplus=True, return_final_states=True)
        >>> y.shape, states.shape
        (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 64, 32]))
    """
    inputs = SSDInputs(x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens)
    _check(inputs, z)
    checks.flag(_OP, dt_softplus=dt_softplus, return_final_states=return_final_states)
    limits = _check_limit(dt_limit)
    if chunk_size is not None:
        checks.size(_OP, "chunk_size", chunk_size)
    _refuse_growth(A)
    result = _SSD.apply(*inputs, SSDOptions(dt_softplus, *limits, return_final_states))
    y, *states = result if return_final_states else (result,)
    y = y if z is None else swiglu(z, y)
    return (y, *states) if return_final_states else y
