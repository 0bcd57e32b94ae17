r"""Softmax over the last dimension. Wide rows use the online softmax of Milakov and Gimelshein, arXiv:1805.02867.

    y     = exp(x - max(x)) / sum(exp(x - max(x)))
    dx    = y * (dy - sum(y * dy))

The kernels compute in fp32 and round once. A row that fits in the registers of one workgroup is read once. A wider row
is read twice, in blocks. In the first pass, each thread keeps the maximum m so far and the sum s of exp(x - m), and a
new maximum m' multiplies s by exp(m - m'). The second pass goes backwards, because the blocks that were read last are
still in the L2 cache.

Shapes: M = rows (all leading dimensions), N = features.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.logits.token.scan import LOG2E
from tigon.runtime import checks
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, cdiv, device_of, next_power_of_2, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.op import Node
from tigon.runtime.rows import dense_rows
from tigon.runtime.tuning import LaunchConfig, rung

# The kernels compute columns as 32-bit ints, also those of a block that ends beyond the row. The reference computes
# wider rows.
MAX_FEATURES = 2**30

# the lowest number of fp32
MIN_FP32 = tl.constexpr(-3.4028234663852886e38)


# --- reference -----------------------------------------------------------------------------------


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Compute `softmax` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    # Without `dtype`, autocast would make the result fp32.
    return torch.softmax(x, dim, dtype=x.dtype)


# --- configuration -------------------------------------------------------------------------------


class SoftmaxProblem(NamedTuple):
    """The properties that the launch parameters of one direction of `softmax` depend on."""

    # N
    features: int
    # bytes of an element
    itemsize: int
    backward: bool


# In each pair, the first number is the largest number of features of a row that is read at once, and the second one is
# the warps, so that a thread has 16 elements of each tensor. With more than 512 threads, a multiprocessor runs one
# program only, and no phases overlap.
WARPS = ((2048, 4), (4096, 8), (16384, 16), (32768, 32))


@dataclass(frozen=True)
class SoftmaxConfig(LaunchConfig):
    """Launch parameters of one direction."""

    # rows of a tile, if a row fits in one block
    block_m: int
    block_n: int
    # neighbouring features that a thread reads at once: 16 bytes
    lane: int
    num_warps: int
    # whether a row fits in one block, so that it is read once
    fits: bool = True
    # whether backward keeps y in registers; a wide row leaves no registers for y, so y is read again from L1 or L2
    keeps_y: bool = True

    @staticmethod
    def heuristic(problem: SoftmaxProblem, device: Device) -> "SoftmaxConfig":
        block_n, lane = max(next_power_of_2(problem.features), 16), 16 // problem.itemsize
        if block_n > (32768 if problem.backward else 16384):
            # 4096 x 128256 in bf16 on an H200: 0.636 + 1.031 ms. With blocks of 4096 and 8 warps, more rows run at a
            # time, less of each is still in L2, and it takes 0.772 + 1.243 ms. The forward of 32000 features takes
            # 0.264 ms, and 0.272 ms in registers.
            return SoftmaxConfig(1, 16384, lane, num_warps=min(32, device.max_warps), fits=False)
        # A tile has about 2048 elements: several short rows, or one long row.
        block_m = max(1, 2048 // block_n)
        num_warps = min(rung(WARPS, block_n), device.max_warps)
        return SoftmaxConfig(block_m, block_n, lane, num_warps, keeps_y=block_n <= 16384)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _load(ptrs, mask, other: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """Load a block as fp32. If EVEN is True, all of its elements exist, so it needs no mask."""
    if EVEN:
        return tl.load(ptrs, eviction_policy=POLICY).to(tl.float32)
    return tl.load(ptrs, mask=mask, other=other, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _fold(x_ptr, start, N, high, total, INSIDE: tl.constexpr, BLOCK_N: tl.constexpr, LANE: tl.constexpr):
    """Add a block of x to each thread's maximum and sum of exp(x - maximum) [BLOCK_N / LANE]."""
    # One thread holds a row of indices, so a reduction over it needs no exchange between threads.
    cols = start + tl.arange(0, BLOCK_N // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # The policy keeps the block in L2 for the second pass.
    x = _load(x_ptr + cols, cols < N, float("-inf"), INSIDE, "evict_last")
    new_high = tl.maximum(high, tl.max(x, axis=1))
    # The difference comes before the product with log2(e), so that the largest feature contributes exactly one.
    total = total * tl.exp2((high - new_high) * LOG2E) + tl.sum(tl.exp2((x - new_high[:, None]) * LOG2E), axis=1)
    return new_high, total


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, y_ptr,  # [M, N] each
    stride_x, stride_y,
    M, N,
    FITS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    if FITS:
        cols = tl.arange(0, BLOCK_N)[None, :]
        rows = (pid * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        x = _load(x_ptr + rows * stride_x + cols, mask, float("-inf"), EVEN, "")  # [BM, BN]
        e = tl.exp2((x - tl.max(x, axis=1, keep_dims=True)) * LOG2E)
        y = e * tl.div_rn(1.0, tl.sum(e, axis=1, keep_dims=True))
        tl.store(y_ptr + rows * stride_y + cols, y, mask=None if EVEN else mask)
    else:
        x_ptr += pid * stride_x
        y_ptr += pid * stride_y
        # The maximum is never -inf, so infinities are not subtracted. A row that has only -inf has the sum 0 and gives
        # NaN.
        high = tl.full([BLOCK_N // LANE], MIN_FP32, tl.float32)
        total = tl.zeros([BLOCK_N // LANE], tl.float32)
        blocks = N // BLOCK_N
        # Whole blocks need no masks. With masks, the arithmetic would take longer than the loads.
        for block in tl.range(0, blocks, num_stages=1):
            high, total = _fold(x_ptr, block * BLOCK_N, N, high, total, True, BLOCK_N, LANE)
        if blocks * BLOCK_N < N:
            high, total = _fold(x_ptr, blocks * BLOCK_N, N, high, total, False, BLOCK_N, LANE)
        top = tl.max(high, axis=0)
        scale = tl.div_rn(1.0, tl.sum(total * tl.exp2((high - top) * LOG2E), axis=0))
        last = tl.cdiv(N, BLOCK_N) - 1
        for block in tl.range(0, last + 1, num_stages=1):
            cols = (last - block) * BLOCK_N + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy="evict_first").to(tl.float32)
            tl.store(y_ptr + cols, tl.exp2((x - top) * LOG2E) * scale, mask=cols < N, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr,  # [M, N] each
    stride_dy, stride_y, stride_dx,
    M, N,
    FITS: tl.constexpr, EVEN: tl.constexpr, KEEPS_Y: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    if FITS:
        cols = tl.arange(0, BLOCK_N)[None, :]
        rows = (pid * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        dy = _load(dy_ptr + rows * stride_dy + cols, mask, 0.0, EVEN, "")  # [BM, BN]
        y = _load(y_ptr + rows * stride_y + cols, mask, 0.0, EVEN, "")
        total = tl.sum(y * dy, axis=1, keep_dims=True)
        if not KEEPS_Y:
            y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dx = y * (dy - total)
        tl.store(dx_ptr + rows * stride_dx + cols, dx, mask=None if EVEN else mask)
    else:
        dy_ptr += pid * stride_dy
        y_ptr += pid * stride_y
        dx_ptr += pid * stride_dx
        sums = tl.zeros([BLOCK_N], tl.float32)
        blocks = tl.cdiv(N, BLOCK_N)
        for block in tl.range(0, blocks, num_stages=1):
            cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
            dy = _load(dy_ptr + cols, cols < N, 0.0, False, "evict_last")
            sums += dy * _load(y_ptr + cols, cols < N, 0.0, False, "evict_last")
        total = tl.sum(sums, axis=0)
        for block in tl.range(0, blocks, num_stages=1):
            cols = (blocks - 1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
            dy = tl.load(dy_ptr + cols, mask=cols < N, eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_ptr + cols, mask=cols < N, eviction_policy="evict_first").to(tl.float32)
            tl.store(dx_ptr + cols, y * (dy - total), mask=cols < N, eviction_policy="evict_first")


# --- launchers (any strides, no autograd) --------------------------------------------------------


@launcher(fake=lambda x: x.new_empty(x.shape))
def softmax_forward(x: Tensor) -> Tensor:
    """Return y [..., N] for x [..., N]."""
    y, n = x.new_empty(x.shape), x.shape[-1]
    x, stride_x = dense_rows(x)
    m, problem = x.numel() // n, SoftmaxProblem(n, x.element_size(), backward=False)
    config = SoftmaxConfig.choose(problem, device_of(x))
    launch(
        _forward_kernel, cdiv(m, config.block_m), x, y, stride_x, n, m, n,
        FITS=config.fits, EVEN=n == config.block_n and config.block_m == 1, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
    return y


@launcher(fake=lambda y: y.new_empty(y.shape))
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Return dx [..., N] for dy and y [..., N]."""
    dx, n = y.new_empty(y.shape), y.shape[-1]
    (dy, stride_dy), (y, stride_y) = dense_rows(dy), dense_rows(y)
    m, problem = y.numel() // n, SoftmaxProblem(n, y.element_size(), backward=True)
    config = SoftmaxConfig.choose(problem, device_of(y))
    launch(
        _backward_kernel, cdiv(m, config.block_m), dy, y, dx, stride_dy, stride_y, n, m, n,
        FITS=config.fits, EVEN=n == config.block_n and config.block_m == 1, KEEPS_Y=config.keeps_y,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return dx


# --- autograd ------------------------------------------------------------------------------------


class _Softmax(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = softmax_forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (y,) = ctx.saved_tensors
        return (softmax_backward(dy, y),)


# --- public --------------------------------------------------------------------------------------


def _check_dim(op: str, dim: object) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{op}: dim must be an int, got {type(dim).__name__}")


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) over one dimension. The result is differentiable.

    torch computes every dimension but the last, because its kernel moves fewer bytes than two transposes would.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        dim: The dimension to sum over.

    Returns:
        A tensor of the shape and the dtype of `x`, under autocast too. As in torch, a row is NaN if all its values are
        -inf, or if one value is NaN or inf.

    Raises:
        TypeError: `x` is not a floating-point tensor, or `dim` is not an int.
        ValueError: `x` has no dimension `dim`.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example:
        >>> tigon.softmax(torch.tensor([[0.0, 0.0], [1.0, float("-inf")]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    checks.tensor("softmax", x=x)
    checks.floating("softmax", x=x)
    _check_dim("softmax", dim)
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim must be in [{-rank}, {rank - 1}], got {checks.format_value(dim)}")
    is_last = x.dim() > 0 and dim in (-1, rank - 1)
    if not runs_kernels(x) or not is_last or not 0 < x.shape[-1] <= MAX_FEATURES:
        return softmax_reference(x, dim)
    return _Softmax.apply(x)


class Softmax(nn.Softmax):
    """Compute `softmax` as a module with the constructor of `torch.nn.Softmax`.

    Args:
        dim: The dimension to sum over.

    Raises:
        TypeError: `dim` is not an int. torch's default of None, which is deprecated, is refused too.

    Example:
        >>> tigon.Softmax()(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("Softmax", dim)
        super().__init__(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `softmax` of x over the dimension of the module."""
        return softmax(x, self.dim)
