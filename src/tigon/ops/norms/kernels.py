r"""The kernels of the norms over the last dimension: RMS and layer norm, with and without a residual added first.

    z     = x + residual                                                     (rounded to its dtype; x without one)
    mean  = mean_features(z), or 0 for RMS;  rstd = (mean_features((z - mean)^2) + eps)^-1/2            (fp32)
    y     = (offset + w) * z_hat + b,  z_hat = (z - mean) * rstd
    dz    = dtotal + rstd * (g - mean_features(g) - z_hat * mean_features(g * z_hat)),  g = dy * (offset + w)
    dw    = sum_rows(dy * z_hat),  db = sum_rows(dy)

`dtotal` is the gradient of z itself, where z is a result too; dz is the gradient of x and of the residual. RMS has no
mean_features(g).

Shapes: M = rows (all leading dimensions), N = features, P = programs of the backward.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import launch, launcher, on_device
from tigon.runtime.rows import dense_rows
from tigon.runtime.tuning import LaunchConfig, rung

__all__ = ["NormConfig", "NormProblem", "SumConfig", "norm_again", "norm_backward", "norm_forward", "sum_rows"]

WIDEST = 32768  # wider rows do not fit in the registers of one workgroup; the references take them
REGISTERS = 2**18  # bytes that the threads of one workgroup hold at most
DENSE = torch.contiguous_format


# --- configuration -------------------------------------------------------------------------------


class NormProblem(NamedTuple):
    """What the launch parameters of a norm depend on."""

    features: int  # N
    itemsize: int  # bytes of an element of z
    loads: int = 2  # tensors [M, N] that the backward reads: dy, z, dtotal
    sums: int = 1  # sums over rows that the backward keeps: dw, db


# For rows of up to so many features: warps of the forward, then warps and programs per multiprocessor of the backward.
# Measured on an H200 in bf16: in the backward short rows do better with many programs (655360 x 128: 0.145 ms for
# 0.286), longer ones with few.
LADDER = (
    (1024, (8, 8, 4)),
    (4096, (4, 4, 2)),
    (8192, (16, 8, 1)),
    (16384, (32, 32, 1)),
)


@dataclass(frozen=True)
class NormConfig(LaunchConfig):
    """Launch parameters of the forward and the backward of all norms."""

    block_m: int  # rows a tile
    block_n: int
    num_warps: int  # of the forward
    backward_warps: int
    num_stages: int  # of the backward's loop over rows
    programs: int  # of the backward, at most: each keeps a partial dw and db
    keeps_w: bool  # in registers through the backward's loop; a wide row has none to spare and reads w again
    keeps_row: bool  # dy and z, while the backward sums over features; otherwise it reads them again, from the L1 cache
    splits: bool  # dw and db are summed by a launch of their own, in blocks of columns
    columns: int = 4096  # columns of a block of that launch

    @staticmethod
    def heuristic(problem: NormProblem, device: Device) -> "NormConfig":
        n, itemsize, loads, sums = problem
        block_n = triton.next_power_of_2(n)
        num_warps, backward_warps, programs = rung(LADDER, block_n)
        # Several short rows, or a long one, a program. Measured on an H200 in bf16: the backward of 16384 x 4096 takes
        # 0.108 ms with pairs of rows, 0.109 without; layer norm has no registers for them.
        block_m = max(1, min(16, 4096 // block_n))
        if block_n == 4096 and sums == 1:
            block_m, backward_warps, programs = 2, 8, 1
        if block_n > 8192 and n != block_n:
            backward_warps = 16  # masks take the registers of more threads
        tile = loads * block_m * block_n * itemsize  # the pipeline holds one for each stage but the last
        # Kept sums and a row must leave half of the registers to addresses, to loads in flight and to what is made.
        fits = lambda rows: (4 * max(sums, 1) + rows * itemsize) * block_n <= REGISTERS // 2
        # Short rows do better without a pipeline, longer ones with loads three tiles ahead.
        pipelined = 1024 < block_n <= 8192 and fits(loads)
        return NormConfig(
            block_m=block_m,
            block_n=block_n,
            num_warps=min(num_warps, device.max_warps),
            backward_warps=min(backward_warps, device.max_warps),
            num_stages=3 if pipelined and programs * 2 * tile <= 0.6 * device.shared_memory else 1,
            programs=programs * device.multiprocessors,
            keeps_w=block_n < 16384,
            keeps_row=fits(loads),
            splits=not fits(2),
        )

    def balanced(self, m: int, blocks: int = 1) -> int:
        """How many programs share `m` rows, each with the same number of tiles and with two at least, where `blocks`
        programs share a row: the fewer, the fewer partial sums.
        """
        tiles, most = cdiv(m, self.block_m), max(1, self.programs // blocks)
        return cdiv(tiles, max(2, cdiv(tiles, most)))


class SumProblem(NamedTuple):
    """What the launch parameters of a sum over rows depend on."""

    features: int  # N


@dataclass(frozen=True)
class SumConfig(LaunchConfig):
    """Launch parameters of `sum_rows`: a program sums `block_n` columns, `block_p` partial sums at a time."""

    block_p: int
    block_n: int
    num_warps: int

    @staticmethod
    def heuristic(problem: SumProblem, device: Device) -> "SumConfig":
        return SumConfig(block_p=256, block_n=32, num_warps=8)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr,  # [M, N], [M, N] or None, [N] or None, [N] or None
    y_ptr, total_ptr, statistics_ptr,  # [M, N], [M, N] or None, fp32: rstd [M] and, if CENTRED, mean [M]
    stride_x, stride_residual,
    M, N, eps, offset,
    CENTRED: tl.constexpr, ROUND_FIRST: tl.constexpr, GIVEN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = EVEN | (cols < N)
    mask = (rows < M) & inside

    z = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)  # [BM, BN]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * stride_residual + cols, mask=mask, other=0.0)
        z = (z.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * N + cols, z, mask=mask)
    dtype = z.dtype
    z = z.to(tl.float32)
    if GIVEN:
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
    tl.store(y_ptr + rows * N + cols, y, mask=mask)


@triton.jit
def _weigh(dy, w, w_ptr, cols, inside, offset, KEEPS_W: tl.constexpr, EVICT: tl.constexpr):
    """g = dy * (offset + w), w kept or read."""
    g = dy
    if w_ptr is not None:
        if not KEEPS_W:
            w = offset + tl.load(w_ptr + cols, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        g = dy * w
    return g


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, dtotal_ptr, z_ptr, w_ptr, statistics_ptr,  # [M, N], [M, N] or None, [M, N], [N] or None, as above
    dz_ptr, dw_ptr, db_ptr,  # [M, N], [P, N] fp32, [P, N] fp32; None where not needed
    stride_dy, stride_dtotal, stride_z,
    M, N, offset,
    CENTRED: tl.constexpr, KEEPS_W: tl.constexpr, KEEPS_ROW: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)  # one, where dz is made: it needs sums over whole rows
    pid = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = EVEN | (cols < N)
    w = 0.0
    if KEEPS_W and w_ptr is not None:
        w = offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)  # [1, BN]
    if dw_ptr is not None:
        dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over its rows once, after the loop
    if db_ptr is not None:
        db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

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
                # From the L1 cache. The other policy keeps the compiler from finding these loads done already.
                dy = tl.load(dy_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z = tl.load(z_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z_hat = (z - mean) * rstd
                g = _weigh(dy, w, w_ptr, cols, inside, offset, KEEPS_W, "evict_last")
            dz = rstd * (g - shift - z_hat * slope)
            if dtotal_ptr is not None:
                dz += tl.load(dtotal_ptr + rows * stride_dtotal + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dz_ptr + rows * N + cols, dz, mask=mask)

    if dw_ptr is not None:
        tl.store(dw_ptr + pid * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=inside)
    if db_ptr is not None:
        tl.store(db_ptr + pid * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=inside)


@triton.jit
def _sum_rows(partial_ptr, sum_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(partial_ptr + rows * N + cols, mask=(rows < P) & (cols < N), other=0.0)
    tl.store(sum_ptr + cols, tl.sum(total, axis=0, keep_dims=True), mask=cols < N)


@triton.jit(do_not_specialize=["P"])
def _sum_kernel(
    first_ptr, second_ptr, first_sum_ptr, second_sum_ptr,  # [P, N] fp32, [P, N] fp32 or None, [N], [N]
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    _sum_rows(first_ptr, first_sum_ptr, P, N, BLOCK_P, BLOCK_N)
    if second_ptr is not None:
        _sum_rows(second_ptr, second_sum_ptr, P, N, BLOCK_P, BLOCK_N)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def sum_rows(partial: Tensor, out: Tensor, second: Tensor | None = None, second_out: Tensor | None = None) -> None:
    """partial [P, N] fp32 -> out [N], its sum over P; and likewise a second."""
    p, n = partial.shape
    config = SumConfig.choose(SumProblem(n), device_of(partial))
    launch(
        _sum_kernel, cdiv(n, config.block_n), partial, second, out, second_out, p, n,
        BLOCK_P=config.block_p, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip


def _empty_forward(x, residual, weight, bias, eps, offset, centred, round_first):
    dtype, total = x.dtype, None
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
        total = torch.empty_like(x, dtype=dtype, memory_format=DENSE)
    if round_first and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=DENSE)
    return y, total, x.new_empty((2 if centred else 1, x.numel() // x.shape[-1]), dtype=torch.float32)


@launcher(fake=_empty_forward)
def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centred: bool,
    round_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., N], weight, bias [N] -> y, x + residual [..., N], rstd and, if centred, mean [1 or 2, M] fp32.

    Without a residual there is no second. `round_first`: z_hat is rounded to the dtype of z before the weight
    multiplies it, and y has the common dtype of the two.
    """
    made = y, total, statistics = _empty_forward(x, residual, weight, bias, eps, offset, centred, round_first)
    n, m = x.shape[-1], statistics.shape[1]
    config = NormConfig.choose(NormProblem(n, x.element_size()), device_of(x))
    x, stride_x = dense_rows(x)
    residual, stride_residual = (None, 0) if residual is None else dense_rows(residual)
    launch(
        _forward_kernel, cdiv(m, config.block_m),
        x, residual, weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous(),
        y, total, statistics, stride_x, stride_residual, m, n, eps, offset,
        CENTRED=centred, ROUND_FIRST=round_first, GIVEN=False, EVEN=n == config.block_n,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return made


@on_device
def norm_again(z: Tensor, weight: Tensor | None, statistics: Tensor, offset: float, round_first: bool) -> Tensor:
    """The y that `norm_forward` made of z, by rstd [1, M] that it kept: another variant of the kernel would sum over
    the features of a row in another order, and round rstd otherwise. Not for centred norms.
    """
    y, _, _ = _empty_forward(z, None, weight, None, 0.0, offset, False, round_first)
    n, m = z.shape[-1], statistics.shape[1]
    config = NormConfig.choose(NormProblem(n, z.element_size()), device_of(z))
    z, stride_z = dense_rows(z)
    launch(
        _forward_kernel, cdiv(m, config.block_m),
        z, None, weight if weight is None else weight.contiguous(), None, y, None, statistics, stride_z, 0, m, n, 0.0,
        offset, CENTRED=False, ROUND_FIRST=round_first, GIVEN=True, EVEN=n == config.block_n,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y


def _empty_backward(dy, dtotal, z, weight, statistics, offset, centred, needs_dz, dw_dtype, db_dtype):
    n = z.shape[-1]
    dz = torch.empty_like(z, memory_format=DENSE) if needs_dz else None
    return dz, *(z.new_empty(n, dtype=dtype) if dtype else None for dtype in (dw_dtype, db_dtype))


@launcher(fake=_empty_backward)
def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    offset: float,
    centred: bool,
    needs_dz: bool,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, dtotal, z [..., N] and what the forward kept -> dz [..., N], dw, db [N] that are needed."""
    dz, dw, db = made = _empty_backward(
        dy, dtotal, z, weight, statistics, offset, centred, needs_dz, dw_dtype, db_dtype
    )
    n, m, device = z.shape[-1], statistics.shape[1], device_of(z)
    loads, sums = 2 if dtotal is None else 3, (dw is not None) + (db is not None)
    config = NormConfig.choose(NormProblem(n, z.element_size(), loads, sums), device)
    dy, stride_dy = dense_rows(dy)
    z, stride_z = dense_rows(z)
    dtotal, stride_dtotal = (None, 0) if dtotal is None else dense_rows(dtotal)
    weight = weight if weight is None else weight.contiguous()

    def run(config: NormConfig, programs: int, dz: Tensor | None, dw: Tensor | None, db: Tensor | None) -> None:
        launch(
            _backward_kernel, programs,
            dy, dtotal, z, weight, statistics, dz, dw, db, stride_dy, stride_dtotal, stride_z, m, n, offset,
            CENTRED=centred, KEEPS_W=config.keeps_w, KEEPS_ROW=config.keeps_row, EVEN=n % config.block_n == 0,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, num_warps=config.backward_warps,
        )  # fmt: skip

    blocks = 1
    if needs_dz and (config.splits or not sums):
        run(config, config.balanced(m), dz, None, None)
        dz = None
    if sums:
        if dz is None:
            config = NormConfig.choose(NormProblem(min(n, config.columns), z.element_size(), 2, sums), device)
            blocks = cdiv(n, config.block_n)
        programs = config.balanced(m, blocks)
        dw_parts, db_parts = (None if x is None else z.new_empty((programs, n), dtype=torch.float32) for x in (dw, db))
        run(config, programs * blocks, dz, dw_parts, db_parts)
        if dw is None:
            sum_rows(db_parts, db)
        else:
            sum_rows(dw_parts, dw, db_parts, db)
    return made
