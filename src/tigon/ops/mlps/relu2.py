r"""The squared ReLU (So et al., arXiv:2109.08668): y = relu(x)^2, dx = 2 relu(x) dy.

In fp32, rounded once. NaN stays NaN, and where x <= 0 dx is 0 whatever dy is, as in eager code. Shapes: any.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from tigon.memory.lean import recomputed_by_call
from tigon.ops.mlps.projections import check_layer
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launcher
from tigon.runtime.rows import block_of_row, dense_rows, launch_blocks
from tigon.runtime.tuning import LaunchConfig

__all__ = ["ReLU2MLP", "relu2", "relu2_reference"]


# --- reference -----------------------------------------------------------------------------------


def relu2_reference(x: Tensor) -> Tensor:
    """Eager definition of `relu2`; the tests' ground truth and the CPU path."""
    return F.relu(x).square()


# --- configuration -------------------------------------------------------------------------------


class ReLU2Problem(NamedTuple):
    """What the launch parameters of `relu2` depend on."""

    itemsize: int  # bytes of an element


@dataclass(frozen=True)
class ReLU2Config(LaunchConfig):
    """Launch parameters: a program takes `block` features of one row (or of the whole tensor, if it has no gaps)."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: ReLU2Problem, device: Device) -> "ReLU2Config":
        # Two accesses of 16 bytes a thread and tensor.
        return ReLU2Config(block=4096 // problem.itemsize, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(x_ptr, y_ptr, stride_x, stride_y, width, blocks, BLOCK: tl.constexpr):  # [M, N] each
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_y + cols, tl.where(x <= 0.0, 0.0, x * x), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, stride_dy, stride_x, stride_dx, width, blocks, BLOCK: tl.constexpr  # [M, N] each
):  # fmt: skip
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * stride_dx + cols, tl.where(x <= 0.0, 0.0, 2.0 * x * dy), mask=mask)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def _launch(kernel, y: Tensor, *inputs: Tensor) -> None:
    """Write `y`, which has no gaps, in the order in which it lies in memory."""
    if not y.is_contiguous():
        # Dimensions of one, whose strides say nothing, to the front.
        order = sorted(range(y.dim()), key=lambda i: (y.shape[i] == 1, y.stride(i)), reverse=True)
        y, *inputs = (x.permute(order) for x in (y, *inputs))
    rows = [dense_rows(x) for x in (*inputs, y)]
    config = ReLU2Config.choose(ReLU2Problem(y.element_size()), device_of(y))
    launch_blocks(
        kernel, y.shape[-1], tuple(x for x, _ in rows), tuple(stride for _, stride in rows), config.block,
        num_warps=config.num_warps,
    )  # fmt: skip


@launcher(fake=torch.empty_like)
def relu2_forward(x: Tensor) -> Tensor:
    """x -> relu(x)^2, of the strides of `x` if that has no gaps."""
    y = torch.empty_like(x)
    _launch(_forward_kernel, y, x)
    return y


@launcher(fake=lambda dy, x: torch.empty_like(x))
def relu2_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dy and x of one shape -> dx."""
    dx = torch.empty_like(x)
    _launch(_backward_kernel, dx, dy, x)
    return dx


# --- autograd ------------------------------------------------------------------------------------


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return relu2_forward(x)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return relu2_backward(dy, *ctx.saved_tensors)


# --- public --------------------------------------------------------------------------------------


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2, with a gradient for `x`: the activation of Nemotron's and Arcee's MLPs.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.

    Returns:
        [..., N] in the dtype of `x`.

    Raises:
        TypeError: `x` is no floating-point tensor.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", arXiv:2109.08668.

    Example:
        >>> tigon.relu2(torch.tensor([-1.0, 0.5, 3.0]))
        tensor([0.0000, 0.2500, 9.0000])
    """
    checks.tensor("relu2", x=x)
    checks.floating("relu2", x=x)
    return _relu2(x)


@recomputed_by_call
def _relu2(x: Tensor) -> Tensor:
    return _ReLU2.apply(x) if runs_kernels(x) and x.dim() and x.shape[-1] else relu2_reference(x)


class ReLU2MLP(nn.Module):
    """MLP of Nemotron and Arcee: `down_proj(relu2(up_proj(x)))`, with the parameter names of Hugging Face's decoders.

    Example:
        >>> tigon.ReLU2MLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory) -> None:
        checks.mlp_module("ReLU2MLP", hidden_size, intermediate_size, bias, factory)
        super().__init__()
        self.hidden_size = hidden_size
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        checks.floating("ReLU2MLP", x=x)
        checks.features("ReLU2MLP", x, self.hidden_size)
        check_layer("ReLU2MLP", x, self.up_proj)
        return self.down_proj(relu2(self.up_proj(x)))
