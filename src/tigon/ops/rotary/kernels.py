r"""The kernels that rotate heads, and normalise them first if a norm is requested, in one pass.

    x_hat = x * rstd,  rstd = (mean(x^2) + eps)^-1/2                                                       (fp32)
    y     = rotate_pairs((offset + w) * x_hat), or rotate_pairs(x) without a norm
    g     = (offset + w) * h,  h = rotate_back(dy)
    dx    = rstd * (g - x_hat * mean(g * x_hat)), or h without a norm
    dw    = sum(h * x_hat)

The mean is over the features of one head (w of shape [D]) or over all heads of a token together (w of shape [H D]).
`rope` explains `rotate_pairs` and its layouts; `rotate_back` is its transpose.

Shapes: B batch, S sequence, Hq and Hk heads of queries and keys, D head size, R rotary features, P = programs of the
backward, T = B S tokens.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.ops.norms.row_sums import sum_rows
from tigon.ops.rotary.heads import (
    PAIRED,
    HeadInputs,
    HeadOptions,
    NeededHeadGradients,
    allocate_output,
    dense_features,
    head_strides,
    load_angles,
    load_heads,
    pack_axes,
    rotate_pairs,
    store_heads,
    table_strides,
)
from tigon.ops.rotary.qk_norm_rope_config import QKNormRopeConfig, heads_of_tile
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of, next_power_of_2
from tigon.runtime.launch import Plan, launcher


@triton.jit
def _load_weight(
    ptr, offset, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAIRED: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load offset + w (one without a weight) in the shape of a tile: [H, ...] if all heads are normalised together,
    else [1, ...]."""
    if ptr is None:
        w1 = tl.full([1, 1], 1.0, tl.float32)
        w2, rest = w1, w1
    else:
        heads = tl.arange(0, BLOCK_H if TOGETHER else 1)[:, None]
        w1, w2, rest = load_heads(ptr + heads * D, heads < H, D, R, PAIRED, BLOCK_R, BLOCK_P)
        w1, w2, rest = w1 + offset, w2 + offset, rest + offset
    return w1, w2, rest


@triton.jit
def _sum_tile(x1, x2, rest, TOGETHER: tl.constexpr):
    """Sum over the features of each head [H, 1], or over all heads [1, 1]."""
    total = tl.sum(x1 + x2, axis=1, keep_dims=True) + tl.sum(rest, axis=1, keep_dims=True)
    if TOGETHER:
        total = tl.sum(total, axis=0, keep_dims=True)
    return total


@triton.jit
def _forward_heads(
    x_ptr, w_ptr, y_ptr, rstd_ptr,  # of one token: [H, D], [D] or [H D], [H, D], [H] or [1]
    stride_x_h, stride_y_h, cos1, cos2, sin1, sin2, eps, offset,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, X_PAIRED: tl.constexpr, Y_PAIRED: tl.constexpr,
    TOGETHER: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token, after a norm if there is memory for rstd."""
    if rstd_ptr is not None:
        w1, w2, w3 = _load_weight(w_ptr, offset, H, D, R, X_PAIRED, TOGETHER, BLOCK_H, BLOCK_R, BLOCK_P)
    for start in range(0, H, BLOCK_H):
        heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        inside = (heads < H) | (H % BLOCK_H == 0)
        x1, x2, x3 = load_heads(x_ptr + heads * stride_x_h, inside, D, R, X_PAIRED, BLOCK_R, BLOCK_P)
        if rstd_ptr is not None:
            squares = _sum_tile(x1 * x1, x2 * x2, x3 * x3, TOGETHER)
            rstd = tl.rsqrt(squares / (D * H if TOGETHER else D) + eps)  # [H, 1] or [1, 1]
            if TOGETHER:
                tl.store(rstd_ptr + tl.zeros([1, 1], tl.int32), rstd)
            else:
                tl.store(rstd_ptr + heads, rstd, mask=inside)
            x1, x2, x3 = x1 * rstd * w1, x2 * rstd * w2, x3 * rstd * w3
        y1, y2 = rotate_pairs(x1, x2, cos1, cos2, sin1, sin2, BACKWARD)
        store_heads(y_ptr + heads * stride_y_h, inside, y1, y2, x3, D, R, Y_PAIRED, BLOCK_R, BLOCK_P)


@triton.jit(do_not_specialize=["stride_cos_a", "S"])
def _forward_kernel(
    cos_ptr, sin_ptr, q_ptr, k_ptr,  # [3, B, S, R] and [B, H, S, D], of any strides
    wq_ptr, wk_ptr, q_out_ptr, k_out_ptr,  # [D] or [H D]; [B, H, S, D] of any strides
    rstd_ptr,  # [T, Hq + Hk], [T, 2] if all heads are normalised together, or None without a norm
    stride_q_b, stride_q_h, stride_q_s, stride_k_b, stride_k_h, stride_k_s,
    stride_q_out_b, stride_q_out_h, stride_q_out_s, stride_k_out_b, stride_k_out_h, stride_k_out_s,
    stride_cos_a, stride_cos_b, stride_cos_s, S, eps, offset,  # sin has the strides of cos
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    X_PAIRED: tl.constexpr, Y_PAIRED: tl.constexpr, AXES: tl.constexpr, TOGETHER: tl.constexpr,
    TABLE: tl.constexpr, STEP: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotate q and k of one token, after their norms if there are any, and store rstd; or rotate gradients back
    (BACKWARD)."""
    token = tl.program_id(0)
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    k_rstd_ptr = rstd_ptr
    if rstd_ptr is not None:
        rstd_ptr += token.to(tl.int64) * (2 if TOGETHER else HQ + HK)
        k_rstd_ptr = rstd_ptr + (1 if TOGETHER else HQ)

    row, PAIRED = b * stride_cos_b + s * stride_cos_s, X_PAIRED or Y_PAIRED
    cos1, cos2 = load_angles(cos_ptr + row, stride_cos_a, R, PAIRED, AXES, BLOCK_R, TABLE, STEP)
    sin1, sin2 = load_angles(sin_ptr + row, stride_cos_a, R, PAIRED, AXES, BLOCK_R, TABLE, STEP)
    _forward_heads(
        q_ptr + b * stride_q_b + s * stride_q_s, wq_ptr, q_out_ptr + b * stride_q_out_b + s * stride_q_out_s, rstd_ptr,
        stride_q_h, stride_q_out_h, cos1, cos2, sin1, sin2, eps, offset,
        HQ, D, R, X_PAIRED, Y_PAIRED, TOGETHER, BACKWARD, BLOCK_HQ, BLOCK_R, BLOCK_P,
    )  # fmt: skip
    if HK:
        _forward_heads(
            k_ptr + b * stride_k_b + s * stride_k_s, wk_ptr, k_out_ptr + b * stride_k_out_b + s * stride_k_out_s,
            k_rstd_ptr, stride_k_h, stride_k_out_h, cos1, cos2, sin1, sin2, eps, offset,
            HK, D, R, X_PAIRED, Y_PAIRED, TOGETHER, BACKWARD, BLOCK_HK, BLOCK_R, BLOCK_P,
        )  # fmt: skip


@triton.jit
def _backward_heads(
    cos_ptr, sin_ptr, dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr,  # dx and dw are None if not needed
    stride_dy_b, stride_dy_h, stride_dy_s, stride_x_b, stride_x_h, stride_x_s, stride_dx_b, stride_dx_h, stride_dx_s,
    stride_cos_a, stride_cos_b, stride_cos_s, S, T, offset,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, X_PAIRED: tl.constexpr, Y_PAIRED: tl.constexpr,
    AXES: tl.constexpr, TOGETHER: tl.constexpr, RSTDS: tl.constexpr, KEEPS_W: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of the tiles of a program, and its partial sum of dw."""
    if KEEPS_W:
        w1, w2, w3 = _load_weight(w_ptr, offset, H, D, R, X_PAIRED, TOGETHER, BLOCK_H, BLOCK_R, BLOCK_P)
    # The heads of these sums are added once, after the loop.
    if dw_ptr is not None:
        dw1 = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
        dw2 = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
        dw3 = tl.zeros([BLOCK_H if R < D else 1, BLOCK_P], tl.float32)

    TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    for tile in tl.range(tl.program_id(0), T * TILES, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(tile // TILES, tl.int32)
        heads = ((tile % TILES) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        inside = (heads < H) | (H % BLOCK_H == 0)
        b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
        dy_ptrs = dy_ptr + b * stride_dy_b + s * stride_dy_s + heads * stride_dy_h
        x_ptrs = x_ptr + b * stride_x_b + s * stride_x_s + heads * stride_x_h
        dy1, dy2, h3 = load_heads(dy_ptrs, inside, D, R, Y_PAIRED, BLOCK_R, BLOCK_P)
        x1, x2, x3 = load_heads(x_ptrs, inside, D, R, X_PAIRED, BLOCK_R, BLOCK_P)
        row = b * stride_cos_b + s * stride_cos_s
        cos1, cos2 = load_angles(cos_ptr + row, stride_cos_a, R, X_PAIRED, AXES, BLOCK_R, "halves")
        sin1, sin2 = load_angles(sin_ptr + row, stride_cos_a, R, X_PAIRED, AXES, BLOCK_R, "halves")
        rstd_ptrs = rstd_ptr + token.to(tl.int64) * RSTDS
        if TOGETHER:
            rstd = tl.load(rstd_ptrs + tl.zeros([1, 1], tl.int32))
        else:
            rstd = tl.load(rstd_ptrs + heads, mask=inside, other=0.0)

        h1, h2 = rotate_pairs(dy1, dy2, cos1, cos2, sin1, sin2, True)
        x1, x2, x3 = x1 * rstd, x2 * rstd, x3 * rstd
        if dw_ptr is not None:
            dw1, dw2 = dw1 + h1 * x1, dw2 + h2 * x2
            if R < D:
                dw3 += h3 * x3
        if dx_ptr is not None:
            if not KEEPS_W:
                w1, w2, w3 = _load_weight(w_ptr, offset, H, D, R, X_PAIRED, TOGETHER, BLOCK_H, BLOCK_R, BLOCK_P)
            g1, g2, g3 = h1 * w1, h2 * w2, h3 * w3
            slope = _sum_tile(g1 * x1, g2 * x2, g3 * x3, TOGETHER) / (D * H if TOGETHER else D)
            dx_ptrs = dx_ptr + b * stride_dx_b + s * stride_dx_s + heads * stride_dx_h
            dx1, dx2, dx3 = rstd * (g1 - x1 * slope), rstd * (g2 - x2 * slope), rstd * (g3 - x3 * slope)
            store_heads(dx_ptrs, inside, dx1, dx2, dx3, D, R, X_PAIRED, BLOCK_R, BLOCK_P)

    if dw_ptr is not None:
        heads = tl.arange(0, BLOCK_H if TOGETHER else 1)[:, None]
        if not TOGETHER:
            dw1, dw2 = tl.sum(dw1, axis=0, keep_dims=True), tl.sum(dw2, axis=0, keep_dims=True)
            dw3 = tl.sum(dw3, axis=0, keep_dims=True)
        store_heads(dw_ptr + heads * D, heads < H, dw1, dw2, dw3, D, R, X_PAIRED, BLOCK_R, BLOCK_P)


@triton.jit(do_not_specialize=["stride_cos_a", "S", "T"])
def _backward_kernel(
    cos_ptr, sin_ptr, dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, rstd_ptr,  # as in `_forward_kernel`
    dq_ptr, dk_ptr, dwq_ptr, dwk_ptr,  # [B, H, S, D] of any strides, [P, stride_dw] fp32; None if not needed
    stride_dq_out_b, stride_dq_out_h, stride_dq_out_s, stride_dk_out_b, stride_dk_out_h, stride_dk_out_s,
    stride_q_b, stride_q_h, stride_q_s, stride_k_b, stride_k_h, stride_k_s,
    stride_dq_b, stride_dq_h, stride_dq_s, stride_dk_b, stride_dk_h, stride_dk_s,
    stride_dw, stride_cos_a, stride_cos_b, stride_cos_s, S, T, offset,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    X_PAIRED: tl.constexpr, Y_PAIRED: tl.constexpr, AXES: tl.constexpr, TOGETHER: tl.constexpr, KEEPS_W: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and weights that are not None."""
    RSTDS: tl.constexpr = 2 if TOGETHER else HQ + HK
    if dwq_ptr is not None:
        dwq_ptr += tl.program_id(0).to(tl.int64) * stride_dw
    if dwk_ptr is not None:
        dwk_ptr += tl.program_id(0).to(tl.int64) * stride_dw
    if dq_ptr is not None or dwq_ptr is not None:
        _backward_heads(
            cos_ptr, sin_ptr, dq_out_ptr, q_ptr, wq_ptr, rstd_ptr, dq_ptr, dwq_ptr,
            stride_dq_out_b, stride_dq_out_h, stride_dq_out_s, stride_q_b, stride_q_h, stride_q_s,
            stride_dq_b, stride_dq_h, stride_dq_s, stride_cos_a, stride_cos_b, stride_cos_s, S, T, offset,
            HQ, D, R, X_PAIRED, Y_PAIRED, AXES, TOGETHER, RSTDS, KEEPS_W, BLOCK_HQ, BLOCK_R, BLOCK_P, STAGES,
        )  # fmt: skip
    if dk_ptr is not None or dwk_ptr is not None:
        _backward_heads(
            cos_ptr, sin_ptr, dk_out_ptr, k_ptr, wk_ptr, rstd_ptr + (1 if TOGETHER else HQ), dk_ptr, dwk_ptr,
            stride_dk_out_b, stride_dk_out_h, stride_dk_out_s, stride_k_b, stride_k_h, stride_k_s,
            stride_dk_b, stride_dk_h, stride_dk_s, stride_cos_a, stride_cos_b, stride_cos_s, S, T, offset,
            HK, D, R, X_PAIRED, Y_PAIRED, AXES, TOGETHER, RSTDS, KEEPS_W, BLOCK_HK, BLOCK_R, BLOCK_P, STAGES,
        )  # fmt: skip


def _choose_config(q: Tensor, k: Tensor | None, options: HeadOptions) -> QKNormRopeConfig:
    count = max(q.shape[options.heads], 0 if k is None else k.shape[options.heads])
    problem = count, q.shape[3], options.together, q.element_size()
    return QKNormRopeConfig.choose(problem, device_of(q))


def _constants(
    shape: tuple[int, ...], hk: int, width: int, options: HeadOptions, block_h: int | None, backward: bool = False
) -> dict[str, Any]:
    """Return the constexprs that both kernels have. `hk` is 0 without k, and `block_h` is None without a norm."""
    hq, d = shape[options.heads], shape[3]
    r = width * (2 if options.table == "once" else 1)
    x_paired, y_paired = PAIRED[options.layout]
    block_hq = block_hk = heads_of_tile(max(hq, hk), d)
    if block_h is not None:
        block_hq, block_hk = min(block_h, next_power_of_2(hq)), min(block_h, next_power_of_2(hk))
    return {
        "HQ": hq, "HK": hk, "D": d, "R": r,
        "X_PAIRED": y_paired if backward else x_paired, "Y_PAIRED": x_paired if backward else y_paired,
        "AXES": pack_axes(options.axes), "TOGETHER": options.together, "BLOCK_HQ": block_hq, "BLOCK_HK": block_hk,
        "BLOCK_R": next_power_of_2(r // 2), "BLOCK_P": next_power_of_2(d - r),
    }  # fmt: skip


# Plans are cached, because small models wait for the host, which takes 6 us for the 18 or 24 ints of a launch.
@functools.lru_cache(4096)
def _plan_forward(
    shape: tuple[int, ...], hk: int, strides: tuple[tuple[int, ...] | None, ...], table: tuple[tuple[int, ...], ...],
    options: HeadOptions, config: QKNormRopeConfig | None, backward: bool,
) -> Plan:  # fmt: skip
    """Return the launch for the shape of q, the strides of q, k, q_out and k_out, and shape and strides of a table."""
    length = shape[3 - options.heads]
    block_h, num_warps = (None, 4) if config is None else (config.block_h, config.num_warps)
    return Plan(
        _forward_kernel, shape[0] * length,
        *head_strides(options.heads, *strides), *table_strides(*table), length, options.eps, options.offset,
        **_constants(shape, hk, table[0][-1], options, block_h, backward),
        TABLE=options.table, STEP=table[1][-1], BACKWARD=backward, num_warps=num_warps,
    )  # fmt: skip


@functools.lru_cache(4096)
def _plan_backward(
    shape: tuple[int, ...], hk: int, strides: tuple[tuple[int, ...] | None, ...], table: tuple[tuple[int, ...], ...],
    options: HeadOptions, config: QKNormRopeConfig, stride_dw: int,
) -> Plan:  # fmt: skip
    """Return the launch for the strides of dq_out, dk_out, q, k, dq and dk; the rest as in `_plan_forward`."""
    length, constants = shape[3 - options.heads], _constants(shape, hk, table[0][-1], options, config.backward_block_h)
    t = shape[0] * length
    return Plan(
        _backward_kernel, min(config.programs, t * cdiv(constants["HQ"], constants["BLOCK_HQ"])),
        *head_strides(options.heads, *strides), stride_dw, *table_strides(*table), length, t, options.offset,
        **constants, KEEPS_W=config.keeps_w, STAGES=config.num_stages, num_warps=config.backward_warps,
    )  # fmt: skip


def _launch_forward(
    cos: Tensor, sin: Tensor, inputs: HeadInputs, q_out: Tensor, k_out: Tensor, rstd: Tensor | None,
    options: HeadOptions, backward: bool = False,
) -> None:  # fmt: skip
    """Write q_out and, if there is k, k_out. With memory for rstd, the heads are normalised first."""
    q, k, q_weight, k_weight = inputs
    q, k = dense_features(q), dense_features(k)
    config = None if rstd is None else _choose_config(q, k, options)
    hk = 0 if k is None else k.shape[options.heads]
    strides = q.stride(), None if k is None else k.stride(), q_out.stride(), None if k is None else k_out.stride()
    plan = _plan_forward(q.shape, hk, strides, (cos.shape, cos.stride()), options, config, backward)
    plan.launch(cos, sin, q, k, q_weight, k_weight, q_out, k_out, rstd)


def _empty_rotated(
    q: Tensor, k: Tensor | None, q_dtype: torch.dtype, k_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return allocate_output(q, q, q_dtype), allocate_output(k, q, k_dtype)


@launcher(fake=_empty_rotated)
def rope_rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, options: HeadOptions, backward: bool,
    q_dtype: torch.dtype, k_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q [B, Hq, S, D] and k [B, Hk, S, D] or None (heads may be in dimension 2), or rotate their gradients back.
    cos and sin are [B | 1, S, R], or [3, B | 1, S, R] with `options.axes`, with equal strides; that of the features is
    1, or 2 with `options.table` "once". The results have `q_dtype` and `k_dtype`. Without k the second result is
    empty."""
    outputs = _empty_rotated(q, k, q_dtype, k_dtype)
    _launch_forward(cos, sin, HeadInputs(q, k, None, None), *outputs, None, options, backward)
    return outputs


def _empty_forward(
    inputs: HeadInputs, options: HeadOptions, q_dtype: torch.dtype, k_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, heads = inputs.q, inputs.k, options.heads
    columns = 2 if options.together else q.shape[heads] + (0 if k is None else k.shape[heads])
    rstd = q.new_empty((q.shape[0] * q.shape[3 - heads], columns), dtype=torch.float32)
    return *_empty_rotated(q, k, q_dtype, k_dtype), rstd


@launcher(fake=_empty_forward)
def qk_norm_rope_forward(
    cos: Tensor, sin: Tensor, inputs: HeadInputs, options: HeadOptions, q_dtype: torch.dtype,
    k_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise and rotate q and k, and return them, each in its dtype, and rstd [T, Hq + Hk], or [T, 2] if all heads
    are normalised together. cos and sin are those of `rope_rotate`. Without k the second result is empty."""
    outputs = _empty_forward(inputs, options, q_dtype, k_dtype)
    _launch_forward(cos, sin, inputs, *outputs, options)
    return outputs


def _empty_backward(inputs: HeadInputs, needs: NeededHeadGradients) -> tuple[Tensor, Tensor, Tensor]:
    q, k = inputs.q, inputs.k
    pairs = (inputs.q_weight, needs.q_weight), (inputs.k_weight, needs.k_weight)
    weights = [weight for weight, is_needed in pairs if weight is not None and is_needed]
    dq = allocate_output(q if needs.q else None, q, q.dtype)
    dk = allocate_output(k if needs.k else None, q, None if k is None else k.dtype)
    dw = q.new_empty(sum(weight.shape[0] for weight in weights), dtype=weights[0].dtype if weights else q.dtype)
    return dq, dk, dw


@launcher(fake=_empty_backward)
def qk_norm_rope_backward(
    cos: Tensor, sin: Tensor, inputs: HeadInputs, rstd: Tensor, dq_out: Tensor | None, dk_out: Tensor | None,
    options: HeadOptions, needs: NeededHeadGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q and of k, and those of both weights in one tensor. Gradients that are not needed are
    empty, and have no part in the third tensor."""
    dq, dk, dw = _empty_backward(inputs, needs)
    q, k, q_weight, k_weight = inputs
    dq_out, dk_out, q, k = dense_features(dq_out), dense_features(dk_out), dense_features(q), dense_features(k)
    n, hk = dw.shape[0], 0 if k is None else k.shape[options.heads]
    dq_stored, dk_stored = dq if needs.q else None, dk if needs.k else None
    strides = tuple([None if x is None else x.stride() for x in (dq_out, dk_out, q, k, dq_stored, dk_stored)])
    config = _choose_config(q, k, options)
    plan = _plan_backward(q.shape, hk, strides, (cos.shape, cos.stride()), options, config, n)
    partial = dw.new_empty((plan.programs, n), dtype=torch.float32)
    # The partial gradients of q_weight come first.
    k_start = q_weight.shape[0] if q_weight is not None and needs.q_weight else 0
    dwq, dwk = partial if needs.q_weight else None, partial[:, k_start:] if needs.k_weight else None
    plan.launch(cos, sin, dq_out, dk_out, q, k, q_weight, k_weight, rstd, dq_stored, dk_stored, dwq, dwk)
    sum_rows(partial, dw)
    return dq, dk, dw
