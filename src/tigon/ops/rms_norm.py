r"""Root-mean-square normalisation over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    rstd  = (mean(x^2) + eps)^-1/2                        (fp32)
    y     = (offset + w) * x * rstd
    dx    = rstd * (g - x_hat * mean(g * x_hat)),  g = dy * (offset + w),  x_hat = x * rstd
    dw    = sum_rows(dy * x_hat)

Shapes: M = rows (all leading dimensions), N = features.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tigon.ops import check
from tigon.ops.dispatch import Device, device_of, first_order, launch, launcher, runs_kernels

__all__ = ["RMSNorm", "rms_norm", "rms_norm_reference"]

Rounding = Literal["before_weight", "after_weight"]  # where x_hat returns to x.dtype: Llama / Gemma, OLMo 2

WIDEST = 32768  # wider rows do not fit in the registers of one workgroup; the reference takes them


# --- reference -----------------------------------------------------------------------------------


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, rounding: Rounding = "before_weight"
) -> Tensor:
    """Eager definition of `rms_norm`; the tests' ground truth and the CPU path."""
    x_hat = x if x.dtype == torch.float64 else x.float()
    x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(x.dtype)
    if rounding == "after_weight":
        return (x_hat * (offset + weight.to(x_hat.dtype))).to(x.dtype)
    if offset:
        return (x_hat.to(x.dtype).to(x_hat.dtype) * (offset + weight.to(x_hat.dtype))).to(torch.result_type(x, weight))
    return weight * x_hat.to(x.dtype)


# --- configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Launch parameters. `heuristic` is a pure function of the problem and the device, tested without a GPU."""

    block_m: int  # rows a tile
    block_n: int
    num_warps: int
    num_stages: int  # of the backward's loop over rows
    programs: int  # of the backward: each keeps a partial dweight
    keeps_w: bool  # in registers through the backward's loop; a wide row has none to spare and reads w again

    @staticmethod
    def heuristic(n: int, itemsize: int, device: Device) -> "Config":
        block_n = triton.next_power_of_2(n)
        # A tile of about 4096 elements: several short rows, or one long row, per program.
        block_m = max(1, min(16, 4096 // block_n))
        # The pipelined loop holds tiles of dy and x for each stage but the last. Short rows do better with many
        # programs and no pipeline: 0.145 ms for 0.286 (H200, 655360 x 128).
        short, tile = block_n <= 1024, 2 * block_m * block_n * itemsize
        return Config(
            block_m=block_m,
            block_n=block_n,
            num_warps=min(8 if short else max(block_n // 1024, 4), device.max_warps),
            num_stages=3 if not short and 2 * tile <= device.shared_memory // 2 else 1,
            programs=device.multiprocessors * (4 if short else 2 if block_n <= 4096 else 1),
            keeps_w=block_n < 16384,
        )


# --- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr,  # [M, N], [N] or None, [M, N], [M] fp32
    stride_x, stride_y,
    M, N, eps, offset,
    ROUND_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)

    x = tl.load(x_ptr + rows[:, None] * stride_x + cols, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)  # [BM]
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)

    y = x * rstd[:, None]
    if w_ptr is not None:
        w = offset + tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if ROUND_FIRST:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        y = y * w
    tl.store(y_ptr + rows[:, None] * stride_y + cols, y, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr,  # [M, N], [M, N], [N], [M], [M, N], [programs, N] fp32
    stride_dy, stride_x, stride_dx,
    M, N, offset,
    NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr, KEEPS_W: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)[None, :]
    if KEEPS_W:
        w = offset + tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # [1, BN]
    if NEEDS_DW:
        dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over its rows once, after the loop

    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        if EVEN:
            mask = rows < M
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [BM, 1]

        x_hat = x * rstd
        if NEEDS_DW:
            dw += dy * x_hat
        if NEEDS_DX:
            g = dy
            if w_ptr is not None:
                if not KEEPS_W:
                    w = offset + tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
                g = dy * w
            dx = rstd * (g - x_hat * (tl.sum(g * x_hat, axis=1, keep_dims=True) / N))
            tl.store(dx_ptr + rows * stride_dx + cols, dx, mask=mask)

    if NEEDS_DW:
        if BLOCK_M > 1:
            dw = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(dw_ptr + pid * N + cols, dw, mask=cols < N)


# --- launchers (2-D in, 2-D out, no autograd) ----------------------------------------------------


def _fake_forward(x, weight, eps, offset, round_first):
    dtype = torch.result_type(x, weight) if weight is not None and round_first else x.dtype
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


@launcher(fake=_fake_forward)
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """x [M, N], weight [N] | None -> y [M, N], rstd [M] fp32."""
    (m, n), config = x.shape, Config.heuristic(x.shape[1], x.element_size(), device_of(x))
    y, rstd = _fake_forward(x, weight, eps, offset, round_first)
    launch(
        _forward_kernel, triton.cdiv(m, config.block_m),
        x, weight, y, rstd, x.stride(0), y.stride(0), m, n, eps, offset,
        ROUND_FIRST=round_first, BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y, rstd


def _fake_backward(dy, x, weight, rstd, offset, needs_dx, needs_dw):
    return x.new_empty(x.shape if needs_dx else (0, 0)), weight.new_empty(weight.shape) if needs_dw else x.new_empty(0)


@launcher(fake=_fake_backward)
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """dy, x [M, N], rstd [M] -> dx [M, N], dweight [N]; one that is not needed is left unwritten."""
    (m, n), config = x.shape, Config.heuristic(x.shape[1], x.element_size(), device_of(x))
    dx = x.new_empty(x.shape if needs_dx else (0, 0))
    programs = min(config.programs, triton.cdiv(m, config.block_m))
    dw = x.new_empty((programs, n) if needs_dw else 0, dtype=torch.float32)
    launch(
        _backward_kernel, programs,
        dy, x, weight, rstd, dx, dw, dy.stride(0), x.stride(0), dx.stride(0), m, n, offset,
        NEEDS_DX=needs_dx, NEEDS_DW=needs_dw, KEEPS_W=weight is not None and config.keeps_w, EVEN=n == config.block_n,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype) if needs_dw else x.new_empty(0)


# --- autograd ------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, round_first):
        y, rstd = rms_norm_forward(x, weight, eps, offset, round_first)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, ctx.offset, needs_dx, needs_dw)
        return dx if needs_dx else None, dweight if needs_dw else None, None, None, None


# --- public --------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, rounding: Rounding = "before_weight"
) -> Tensor:
    """RMS normalisation of the last dimension, with gradients for `x` and `weight`.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        weight: [N], or None for no scale.
        eps: Added to the mean square.
        offset: Added to `weight`; 1.0 for Gemma, whose weights start at zero.
        rounding: Where the normalised value returns to `x.dtype`: before the multiplication by
            `weight` (Llama) or after it (Gemma, OLMo 2).

    Returns:
        [..., N]. In `x.dtype`; with `rounding="before_weight"` in the common dtype of `x` and `weight`, as
        the product of the two has it.

    Raises:
        TypeError: `x` or `weight` is no floating-point tensor.
        ValueError: `weight` is not of shape [N] or lies on another device, `rounding` is unknown, or `eps` is negative.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Example:
        >>> x, weight = torch.randn(2, 5, 64), torch.ones(64)
        >>> tigon.rms_norm(x, weight).shape
        torch.Size([2, 5, 64])
    """
    check.floating("rms_norm", x=x, weight=weight)
    check.choice("rms_norm", "rounding", rounding, ("before_weight", "after_weight"))
    eps, offset = check.number("rms_norm", "eps", eps, 0.0), check.number("rms_norm", "offset", offset)
    if x.dim() == 0:
        raise ValueError("rms_norm: x must have at least one dimension, got a scalar")
    if weight is not None:
        check.shape("rms_norm", "weight", weight, x.shape[-1:])
        check.same("rms_norm", "device", x=x, weight=weight)
    n = x.shape[-1]
    if not runs_kernels(x, weight) or not 0 < n <= WIDEST:
        return rms_norm_reference(x, weight, eps, offset=offset, rounding=rounding)
    rows = x.reshape(-1, n)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    weight = weight if weight is None else weight.contiguous()
    y = _RMSNorm.apply(rows, weight, eps, offset, rounding == "before_weight")
    return y.view(x.shape)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `rms_norm`: same arguments, same state dict.

    Args:
        normalized_shape: N, or a shape of one dimension.
        eps: Added to the mean square; None is the machine epsilon of fp32 (of fp64 for fp64 inputs), as in torch.
        elementwise_affine: Whether there is a weight.

    Example:
        >>> tigon.RMSNorm(64)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True, **factory) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **factory)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"RMSNorm: normalized_shape must have one dimension, got {tuple(self.normalized_shape)}")

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(f"RMSNorm: x must end in {tuple(self.normalized_shape)}, got shape {tuple(x.shape)}")
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, rounding="after_weight")  # as torch rounds
