r"""The squared ReLU (So et al., arXiv:2109.08668): y = relu(x)^2, dx = 2 relu(x) dy.

The kernels compute in fp32 and round once. As in eager code, NaN stays NaN, and dx is 0 for x <= 0, even if dy is NaN.

Shapes: M = rows, N = features.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import recomputed_by_call
from tigon.ops.mlps.projections import check_layer
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launcher
from tigon.runtime.rows import block_of_row, dense_rows, in_memory_order, launch_blocks
from tigon.runtime.tuning import LaunchConfig

# --- reference -----------------------------------------------------------------------------------


def relu2_reference(x: Tensor) -> Tensor:
    """Compute `relu2` in eager torch, for tests and for devices without Triton."""
    return F.relu(x).square()


# --- configuration -------------------------------------------------------------------------------


class ReLU2Problem(NamedTuple):
    """The size that the launch parameters of `relu2` depend on."""

    # Bytes of an element.
    itemsize: int


@dataclass(frozen=True)
class ReLU2Config(LaunchConfig):
    """Launch parameters. A program computes `block` features of a row, or of the whole tensor if it has no gaps."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: ReLU2Problem, device: Device) -> "ReLU2Config":
        """Return a block with which each thread accesses 16 bytes twice in each tensor."""
        return ReLU2Config(block=4096 // problem.itemsize, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(x_ptr, y_ptr, stride_x, stride_y, width, blocks, BLOCK: tl.constexpr):  # [M, N] each
    """Compute relu(x)^2 for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_y + cols, tl.where(x <= 0.0, 0.0, x * x), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, stride_dy, stride_x, stride_dx, width, blocks, BLOCK: tl.constexpr  # [M, N] each
):  # fmt: skip
    """Compute dx for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * stride_dx + cols, tl.where(x <= 0.0, 0.0, 2.0 * x * dy), mask=mask)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def _launch(kernel: JITFunction, y: Tensor, *inputs: Tensor) -> None:
    """Write `y`, which has no gaps, in the order of its memory."""
    tensors = in_memory_order(y, *inputs)
    rows = [dense_rows(x) for x in tensors]
    config = ReLU2Config.choose(ReLU2Problem(y.element_size()), device_of(y))
    launch_blocks(
        kernel, tensors[-1].shape[-1], tuple(x for x, _ in rows), tuple(stride for _, stride in rows), config.block,
        num_warps=config.num_warps,
    )  # fmt: skip


@launcher(fake=lambda x: torch.empty_like(x))
def relu2_forward(x: Tensor) -> Tensor:
    """Return relu(x)^2, with the strides of `x` if `x` has no gaps."""
    y = torch.empty_like(x)
    _launch(_forward_kernel, y, x)
    return y


@launcher(fake=lambda x: torch.empty_like(x))
def relu2_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dx for dy and x of the same shape."""
    dx = torch.empty_like(x)
    _launch(_backward_kernel, dx, dy, x)
    return dx


# --- autograd ------------------------------------------------------------------------------------


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return relu2_forward(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return relu2_backward(dy, *ctx.saved_tensors)


# --- public --------------------------------------------------------------------------------------


def relu2(x: Tensor) -> Tensor:
    """Return relu(x)^2, the activation of the MLPs of Nemotron and Arcee. `x` gets a gradient.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.

    Returns:
        [..., N] in the dtype of `x`.

    Raises:
        TypeError: `x` is not a floating-point tensor.

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
    """The MLP of Nemotron and Arcee: `down_proj(relu2(up_proj(x)))`, with the parameter names of transformers.

    Args:
        hidden_size: H, the features of the input and of the output.
        intermediate_size: I, the features of the activation.
        bias: Whether both projections have a bias.
        factory: The `device` and the `dtype` of the parameters.

    Raises:
        TypeError: An argument has another type. The forward raises it if its input is not a floating-point tensor.
        ValueError: A size is not positive, or `factory` has another option or an unknown device. The forward raises it
            if its input does not end in H features, or has another dtype or device than the weights.

    Example:
        >>> tigon.ReLU2MLP(64, 256)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory: Any) -> None:
        checks.mlp_module("ReLU2MLP", hidden_size, intermediate_size, bias, factory)
        super().__init__()
        self.hidden_size = hidden_size
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x [..., H]."""
        checks.floating("ReLU2MLP", x=x)
        checks.features("ReLU2MLP", x, self.hidden_size)
        check_layer("ReLU2MLP", x, self.up_proj)
        return self.down_proj(relu2(self.up_proj(x)))
