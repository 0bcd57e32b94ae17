r"""The kernels of the norms over the last dimension: RMS and layer norm, with and without a residual added first.

    z     = x + residual, rounded to the dtype of z, or z = x if there is no residual
    mean  = mean_features(z), or 0 for RMS;  rstd = (mean_features((z - mean)^2) + eps)^-1/2            (fp32)
    y     = (offset + w) * z_hat + b,  z_hat = (z - mean) * rstd
    dz    = dtotal + rstd * (g - mean_features(g) - z_hat * mean_features(g * z_hat)),  g = dy * (offset + w)
    dw    = sum_rows(dy * z_hat),  db = sum_rows(dy)

`dtotal` is the upstream gradient of z, which exists if the op returns z too. dz is the gradient of both x and the
residual. RMS norms have no term mean_features(g).

The backward also raises a maximum to the largest |dz| as it is stored, if an FP8 layer reads dz (`runtime.maxima`).

Shapes: M = rows (all leading dimensions), N = features, P = programs of the backward.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.norms.norm_config import NormConfig
from tigon.ops.norms.row_sums import sum_rows
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of
from tigon.runtime.launch import Plan, launcher, on_device
from tigon.runtime.maxima import magnitude_bits, raise_to_largest
from tigon.runtime.rows import dense_rows


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr,  # [M, N], [M, N] or None, [N] or None, [N] or None
    y_ptr, total_ptr, statistics_ptr,  # [M, N], [M, N] or None, fp32: rstd [M] and, if CENTRED, mean [M]
    stride_x, stride_residual,
    M, N, eps, offset,
    CENTRED: tl.constexpr, ROUND_FIRST: tl.constexpr, READS_RSTD: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalise a tile of rows. If READS_RSTD is True, rstd is an input instead of a result. If EVEN is True, the tile
    has exactly N columns, so the columns need no mask."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = EVEN | (cols < N)
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    mask = (rows < M) & inside
    z = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)  # [BM, BN]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * stride_residual + cols, mask=mask, other=0.0)
        z = (z.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * N + cols, z, mask=mask)
    dtype = z.dtype
    z = z.to(tl.float32)
    if READS_RSTD:
        rstd = tl.load(statistics_ptr + rows, mask=rows < M, other=0.0)  # [BM, 1]
    else:
        if CENTRED:
            mean = tl.sum(z, axis=1, keep_dims=True) / N  # [BM, 1]
            tl.store(statistics_ptr + M + rows, mean, mask=rows < M)
            z = tl.where(inside, z - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(z * z, axis=1, keep_dims=True) / N + eps)
        tl.store(statistics_ptr + rows, rstd, mask=rows < M)

    y = z * rstd
    if ROUND_FIRST:
        y = y.to(dtype).to(tl.float32)
    if w_ptr is not None:
        y *= offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weigh(dy, w, w_ptr, cols, inside, offset, KEEPS_W: tl.constexpr, EVICT: tl.constexpr):
    """Return g = dy * (offset + w). If KEEPS_W is True, `w` already holds offset + w; otherwise w is loaded."""
    g = dy
    if w_ptr is not None:
        if not KEEPS_W:
            w = offset + tl.load(w_ptr + cols, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        g = dy * w
    return g


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, dtotal_ptr, z_ptr, w_ptr,  # [M, N], [M, N] or None, [M, N], [N] or None
    statistics_ptr,  # fp32: rstd [M] and, if CENTRED, mean [M]
    dz_ptr, dw_ptr, db_ptr,  # [M, N], [P, N] fp32, [P, N] fp32; None if not needed
    maximum_ptr,  # int32 [1] or None
    stride_dy, stride_dtotal, stride_z,
    M, N, offset,
    CENTRED: tl.constexpr, KEEPS_W: tl.constexpr, KEEPS_ROW: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dz of the rows of a program, and partial sums of dw and db."""
    # The number of blocks of columns. It is one if dz is computed, because dz needs sums over whole rows.
    blocks = tl.cdiv(N, BLOCK_N)
    pid = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = EVEN | (cols < N)
    w = 0.0
    if KEEPS_W and w_ptr is not None:
        w = offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)  # [1, BN]
    # The rows of these sums are added once, after the loop.
    if dw_ptr is not None:
        dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if db_ptr is not None:
        db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if maximum_ptr is not None:
        row_bits = tl.zeros([BLOCK_M, 1], tl.int32)

    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0) // blocks, num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & inside
        dy_ptrs, z_ptrs = dy_ptr + rows * stride_dy + cols, z_ptr + rows * stride_z + cols
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
        z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(statistics_ptr + rows, mask=rows < M, other=0.0)  # [BM, 1]
        mean = 0.0
        if CENTRED:
            mean = tl.load(statistics_ptr + M + rows, mask=rows < M, other=0.0)

        z_hat = (z - mean) * rstd
        if dw_ptr is not None:
            dw += dy * z_hat
        if db_ptr is not None:
            db += dy
        if dz_ptr is not None:
            g = _weigh(dy, w, w_ptr, cols, inside, offset, KEEPS_W, "")
            slope = tl.sum(g * z_hat, axis=1, keep_dims=True) / N
            shift = 0.0
            if CENTRED:
                shift = tl.sum(g, axis=1, keep_dims=True) / N
            if not KEEPS_ROW:
                # These loads hit the L1 cache. The other eviction policy keeps the compiler from merging them with the
                # first loads, which would keep the row in registers.
                dy = tl.load(dy_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z = tl.load(z_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z_hat = (z - mean) * rstd
                g = _weigh(dy, w, w_ptr, cols, inside, offset, KEEPS_W, "evict_last")
            dz = rstd * (g - shift - z_hat * slope)
            if dtotal_ptr is not None:
                dz += tl.load(dtotal_ptr + rows * stride_dtotal + cols, mask=mask, other=0.0).to(tl.float32)
            dz = dz.to(dz_ptr.dtype.element_ty)
            tl.store(dz_ptr + rows * N + cols, dz, mask=mask)
            if maximum_ptr is not None:
                bits = tl.where(mask, magnitude_bits(dz.to(tl.float32)), 0)
                row_bits = tl.maximum(row_bits, tl.max(bits, axis=1, keep_dims=True))

    if maximum_ptr is not None:
        raise_to_largest(maximum_ptr, row_bits)
    if dw_ptr is not None:
        tl.store(dw_ptr + pid * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=inside)
    if db_ptr is not None:
        tl.store(db_ptr + pid * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=inside)


class NormOptions(NamedTuple):
    """The options of a norm. With `round_first`, z_hat is rounded to the dtype of z before the weight multiplies it,
    and y has the common dtype of z and the weight. A norm that is `centred` subtracts the mean."""

    eps: float
    offset: float
    round_first: bool
    centred: bool = False


def _empty_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, options: NormOptions
) -> tuple[Tensor, Any, Tensor]:
    """Allocate what `norm_forward` returns. The second result is None without a residual."""
    dtype, total = x.dtype, None
    if residual is not None:
        dtype = dtype if residual.dtype == dtype else torch.promote_types(dtype, residual.dtype)
        total = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if options.round_first and weight is not None and weight.dtype != dtype:
        dtype = torch.promote_types(dtype, weight.dtype)
    statistics = x.new_empty((2 if options.centred else 1, x.numel() // x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), total, statistics


# Plans are cached, because small models wait for the host.
@functools.lru_cache(4096)
def _plan_forward(
    config: NormConfig, m: int, n: int, stride_x: int, stride_residual: int, options: NormOptions, reads_rstd: bool
) -> Plan:
    return Plan(
        _forward_kernel, cdiv(m, config.block_m), stride_x, stride_residual, m, n, options.eps, options.offset,
        CENTRED=options.centred, ROUND_FIRST=options.round_first, READS_RSTD=reads_rstd, EVEN=n == config.block_n,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip


def _run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: NormOptions,
    results: tuple[Tensor, Tensor | None, Tensor], reads_rstd: bool = False,
) -> None:  # fmt: skip
    """Write y, x + residual and the statistics. With `reads_rstd`, the statistics are an input instead of a result."""
    n, statistics = x.shape[-1], results[2]
    config = NormConfig.choose((n, x.element_size(), 2, 1), device_of(x))
    x, stride_x = dense_rows(x)
    residual, stride_residual = (None, 0) if residual is None else dense_rows(residual)
    weight, bias = weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous()
    plan = _plan_forward(config, statistics.shape[1], n, stride_x, stride_residual, options, reads_rstd)
    plan.launch(x, residual, weight, bias, *results)


@launcher(fake=_empty_forward)
def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: NormOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x, or x + residual, both [..., N], with weight and bias [N]. Return y; x + residual, or None without a
    residual; and [1 or 2, M] fp32: rstd and, if centred, the mean."""
    results = _empty_forward(x, residual, weight, options)
    _run_forward(x, residual, weight, bias, options, results)
    return results


@on_device
def recompute_norm(z: Tensor, weight: Tensor | None, statistics: Tensor, offset: float, round_first: bool) -> Tensor:
    """Return y of z, bitwise equal to the result of `norm_forward`, from the rstd [1, M] of that call. rstd is not
    recomputed, because a variant of the kernel without a residual may sum the features of a row in another order and
    round rstd differently. Centred norms are not supported."""
    options = NormOptions(0.0, offset, round_first)
    y, _, _ = _empty_forward(z, None, weight, options)
    _run_forward(z, None, weight, None, options, (y, None, statistics), reads_rstd=True)
    return y


class NeededNormGradients(NamedTuple):
    """Whether the gradient of z is needed, and the dtypes of those of weight and bias, or None if they are not."""

    z: bool
    weight: torch.dtype | None
    bias: torch.dtype | None


def _empty_backward(z: Tensor, needs: NeededNormGradients) -> tuple[Any, Any, Any]:
    """Allocate the gradients that are needed. The others are None."""
    dz = torch.empty_like(z, memory_format=torch.contiguous_format) if needs.z else None
    dw = None if needs.weight is None else z.new_empty(z.shape[-1], dtype=needs.weight)
    db = None if needs.bias is None else z.new_empty(z.shape[-1], dtype=needs.bias)
    return dz, dw, db


@functools.lru_cache(4096)
def _plan_backward(config: NormConfig, centred: bool, programs: int, numbers: tuple[Any, ...]) -> Plan:
    *_, n, _ = numbers
    return Plan(
        _backward_kernel, programs, *numbers,
        CENTRED=centred, KEEPS_W=config.keeps_w, KEEPS_ROW=config.keeps_row, EVEN=n % config.block_n == 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, num_warps=config.backward_warps,
    )  # fmt: skip


@launcher(fake=_empty_backward)
def norm_backward(
    dy: Tensor, dtotal: Tensor | None, z: Tensor, weight: Tensor | None, statistics: Tensor, offset: float,
    needs: NeededNormGradients, maximum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dz [..., N], dw [N] and db [N] from dy, dtotal and z [..., N] and the statistics of the forward. A
    gradient that is not needed is None. `maximum` [1] is raised to the bits of the largest |dz|, if it is not None."""
    dz, dw, db = _empty_backward(z, needs)
    n, m, device = z.shape[-1], statistics.shape[1], device_of(z)
    # The second row of the statistics holds the means.
    centred = statistics.shape[0] == 2
    loads, sums = 2 if dtotal is None else 3, (dw is not None) + (db is not None)
    config = NormConfig.choose((n, z.element_size(), loads, sums), device)
    dy, stride_dy = dense_rows(dy)
    z, stride_z = dense_rows(z)
    dtotal, stride_dtotal = (None, 0) if dtotal is None else dense_rows(dtotal)
    weight = weight if weight is None else weight.contiguous()
    inputs, numbers = (dy, dtotal, z, weight, statistics), (stride_dy, stride_dtotal, stride_z, m, n, offset)

    is_split = config.splits or not sums
    if dz is not None and is_split:
        _plan_backward(config, centred, config.count_programs(m), numbers).launch(*inputs, dz, None, None, maximum)
    if sums:
        blocks = 1
        if is_split or dz is None:
            config = NormConfig.choose((min(n, config.columns), z.element_size(), 2, sums), device)
            blocks = cdiv(n, config.block_n)
        programs = config.count_programs(m, blocks)
        dw_parts = None if dw is None else z.new_empty((programs, n), dtype=torch.float32)
        db_parts = None if db is None else z.new_empty((programs, n), dtype=torch.float32)
        stored, maximum = (None, None) if is_split or dz is None else (dz, maximum)
        plan = _plan_backward(config, centred, programs * blocks, numbers)
        plan.launch(*inputs, stored, dw_parts, db_parts, maximum)
        if dw_parts is not None:
            sum_rows(dw_parts, dw, db_parts, db)
        elif db_parts is not None:
            sum_rows(db_parts, db)
    return dz, dw, db
