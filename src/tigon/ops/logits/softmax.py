r"""Softmax over the last dimension.

    y     = exp(x - max(x)) / sum(exp(x - max(x)))
    dx    = y * (dy - sum(y * dy))

The kernels compute in fp32 and round once. They hold a row in the registers of one workgroup, so it is read once. torch
computes wider rows, such as those of a vocabulary, which no attention has.

Shapes: M = rows (all leading dimensions), N = features.
"""

from dataclasses import dataclass
from typing import Any

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

# Wider rows do not fit in the registers. The reference computes them.
MAX_FEATURES = 32768


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Compute `softmax` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    # Without `dtype`, autocast would make the result fp32.
    return torch.softmax(x, dim, dtype=x.dtype)


# In each pair, the first number is the largest number of features of a row that is read at once, and the second one is
# the warps, so that a thread has 16 elements of each tensor. With more than 512 threads, a multiprocessor runs one
# program only, and no phases overlap.
WARPS = ((2048, 4), (4096, 8), (16384, 16), (32768, 32))


@dataclass(frozen=True)
class SoftmaxConfig(LaunchConfig):
    # A tile has this many rows.
    block_m: int
    block_n: int
    num_warps: int
    # True if y stays in registers during backward. A wide row leaves no registers for y, so y is read again from L1 or
    # L2.
    keeps_y: bool = True

    @staticmethod
    def heuristic(problem: tuple[int], device: Device) -> "SoftmaxConfig":
        block_n = max(next_power_of_2(problem[0]), 16)
        # A tile has about 2048 elements: several short rows, or one long row.
        block_m = max(1, 2048 // block_n)
        num_warps = min(rung(WARPS, block_n), device.max_warps)
        return SoftmaxConfig(block_m, block_n, num_warps, keeps_y=block_n <= 16384)


@triton.jit
def _load(ptrs, mask, other: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile as fp32. If EVEN is True, all of its elements exist, so it needs no mask."""
    if EVEN:
        return tl.load(ptrs).to(tl.float32)
    return tl.load(ptrs, mask=mask, other=other).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, y_ptr,  # [M, N] each
    stride_x, stride_y, M, N,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    mask = (rows < M) & (cols < N)
    x = _load(x_ptr + rows * stride_x + cols, mask, float("-inf"), EVEN)  # [BM, BN]
    e = tl.exp2((x - tl.max(x, axis=1, keep_dims=True)) * LOG2E)
    y = e * tl.div_rn(1.0, tl.sum(e, axis=1, keep_dims=True))
    tl.store(y_ptr + rows * stride_y + cols, y, mask=None if EVEN else mask)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr,  # [M, N] each
    stride_dy, stride_y, stride_dx, M, N,
    EVEN: tl.constexpr, KEEPS_Y: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    mask = (rows < M) & (cols < N)
    dy = _load(dy_ptr + rows * stride_dy + cols, mask, 0.0, EVEN)  # [BM, BN]
    y = _load(y_ptr + rows * stride_y + cols, mask, 0.0, EVEN)
    total = tl.sum(y * dy, axis=1, keep_dims=True)
    if not KEEPS_Y:
        y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    dx = y * (dy - total)
    tl.store(dx_ptr + rows * stride_dx + cols, dx, mask=None if EVEN else mask)


@launcher(fake=lambda x: x.new_empty(x.shape))
def softmax_forward(x: Tensor) -> Tensor:
    """Return y [..., N] for x [..., N]."""
    y, n = x.new_empty(x.shape), x.shape[-1]
    x, stride_x = dense_rows(x)
    m, config = x.numel() // n, SoftmaxConfig.choose((n,), device_of(x))
    launch(
        _forward_kernel, cdiv(m, config.block_m), x, y, stride_x, n, m, n,
        EVEN=n == config.block_n and config.block_m == 1, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )  # fmt: skip
    return y


@launcher(fake=lambda y: y.new_empty(y.shape))
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Return dx [..., N] for dy and y [..., N]."""
    dx, n = y.new_empty(y.shape), y.shape[-1]
    (dy, stride_dy), (y, stride_y) = dense_rows(dy), dense_rows(y)
    m, config = y.numel() // n, SoftmaxConfig.choose((n,), device_of(y))
    launch(
        _backward_kernel, cdiv(m, config.block_m), dy, y, dx, stride_dy, stride_y, n, m, n,
        EVEN=n == config.block_n and config.block_m == 1, KEEPS_Y=config.keeps_y,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return dx


class _Softmax(Node):
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = softmax_forward(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (y,) = ctx.saved_tensors
        return (softmax_backward(dy, y),)


def _check_dim(op: str, dim: object) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{op}: dim must be an int, got {type(dim).__name__}")


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) over one dimension. The result is differentiable.

    torch computes rows of more than 32768 features, and every dimension but the last, because its kernel moves fewer
    bytes than two transposes would.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        dim: The dimension to sum over.

    Returns:
        A tensor of the shape and the dtype of `x`, under autocast too. As in torch, a row is NaN if all its values are
        -inf, or if one value is NaN or inf.

    Raises:
        TypeError: `x` is not a floating-point tensor, or `dim` is not an int.
        ValueError: `x` has no dimension `dim`.

    Source: Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990.

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
