r"""The Gaussian error linear unit (Hendrycks and Gimpel, arXiv:1606.08415) and its two approximations.

    none      y = x * (1 + erf(x / sqrt 2)) / 2
    tanh      y = x * (1 + tanh u) / 2,  u = sqrt(2 / pi) * (x + 0.044715 x^3)
    sigmoid   y = x * s(1.702 x), called "quick GELU" by models

    dx = dy * act'(x)

s is the logistic function. The kernels compute in fp32 and round once. Models that write the approximation as a
sequence of torch operations round after each of them, and save up to seven tensors of the size of x. This op saves x.

Shapes: M = rows, N = features.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.mlps.glu import activation_and_slope
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launcher, on_device
from tigon.runtime.rows import block_of_row, dense_rows, in_memory_order, launch_blocks
from tigon.runtime.tuning import LaunchConfig

# The kinds of the kernels, by the name of the approximation.
KINDS = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}


# --- reference -----------------------------------------------------------------------------------


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute `gelu` in eager torch, for tests and for devices without Triton."""
    return x * torch.sigmoid(1.702 * x) if approximate == "sigmoid" else F.gelu(x, approximate=approximate)


# --- configuration -------------------------------------------------------------------------------


class GELUProblem(NamedTuple):
    """The properties that the launch parameters of an activation without a gate depend on."""

    # The activation: a value of `KINDS`, or "relu2".
    kind: str
    # Bytes of an element.
    itemsize: int


@dataclass(frozen=True)
class GELUConfig(LaunchConfig):
    """Launch parameters. A program computes `block` features of a row, or of the whole tensor if it has no gaps."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: GELUProblem, device: Device) -> "GELUConfig":
        """Return a block with which each thread accesses 16 bytes twice in each tensor, as in `relu2`."""
        # Not measured. The floor is the traffic: the forward reads x and writes y (2 M N elements), the backward reads
        # dy and x and writes dx (3 M N elements).
        return GELUConfig(block=4096 // problem.itemsize, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """Return act(x) and act'(x) for x in fp32. A NaN stays a NaN."""
    if KIND == "relu2":
        act, slope = tl.where(x <= 0.0, 0.0, x * x), 2.0 * x
    else:
        act, slope = activation_and_slope(x, KIND)
    return act, slope


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    x_ptr, y_ptr, stride_x, stride_y, width, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr  # [M, N] each
):  # fmt: skip
    """Compute act(x) for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    act, _ = _activation(x, KIND)
    tl.store(y_ptr + row * stride_y + cols, act, mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, x_ptr, y_ptr, dx_ptr,  # [M, N] each; y is recomputed, or None
    stride_dy, stride_x, stride_y, stride_dx, width, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx and, if it is needed, y for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    act, slope = _activation(x, KIND)
    dx = dy * slope
    if KIND == "relu2":
        # Eager code has dx = 0 here, even if dy is NaN.
        dx = tl.where(x <= 0.0, 0.0, dx)
    # All inputs are loaded by now, so results may overwrite them.
    if y_ptr is not None:
        tl.store(y_ptr + row * stride_y + cols, act, mask=mask)
    tl.store(dx_ptr + row * stride_dx + cols, dx, mask=mask)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def _launch(kernel: JITFunction, kind: str, y: Tensor, *inputs: Tensor) -> None:
    """Write `y`, which has no gaps, in the order of its memory. The backward kernel gets no recomputed tensor."""
    rows = [dense_rows(x) for x in in_memory_order(y, *inputs)]
    tensors: list[Tensor | None] = [x for x, _ in rows]
    strides, width = [stride for _, stride in rows], rows[-1][0].shape[-1]
    if len(inputs) == 2:
        tensors.insert(2, None)
        strides.insert(2, width)
    config = GELUConfig.choose(GELUProblem(kind, y.element_size()), device_of(y))
    launch_blocks(
        kernel, width, tuple(tensors), tuple(strides), config.block, KIND=kind, num_warps=config.num_warps
    )  # fmt: skip


@launcher(fake=lambda x, kind: torch.empty_like(x))
def activation_forward(x: Tensor, kind: str) -> Tensor:
    """Return act(x), with the strides of `x` if `x` has no gaps."""
    y = torch.empty_like(x)
    _launch(_forward_kernel, kind, y, x)
    return y


@launcher(fake=lambda dy, x, kind: torch.empty_like(x))
def activation_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return dx for dy and x of the same shape."""
    dx = torch.empty_like(x)
    _launch(_backward_kernel, kind, dx, dy, x)
    return dx


@on_device
def activation_backward_into(dy: Tensor, x: Tensor, kind: str, dx: Tensor, y: Tensor | None) -> None:
    """Write dx and, if `y` is a tensor, y = act(x).

    All tensors are contiguous [M, N]. A result may be the same tensor as dy or x.
    """
    config = GELUConfig.choose(GELUProblem(kind, x.element_size()), device_of(x))
    width = x.shape[-1]
    launch_blocks(
        _backward_kernel, width, (dy, x, y, dx), (width,) * 4, config.block, KIND=kind, num_warps=config.num_warps
    )  # fmt: skip


# --- autograd ------------------------------------------------------------------------------------


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return activation_forward(x, kind)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return activation_backward(dy, x, ctx.kind), None


# --- public --------------------------------------------------------------------------------------


def gelu(x: Tensor, approximate: Literal["none", "tanh", "sigmoid"] = "none") -> Tensor:
    """Return the GELU of x, the activation of the MLPs of BERT, GPT-2 and vision towers. `x` gets a gradient.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        approximate: "none" is the exact GELU, "tanh" the approximation of GPT-2 (as in `F.gelu`), and "sigmoid" the
            approximation x * sigmoid(1.702 x) of CLIP.

    Returns:
        [..., N] in the dtype of `x`.

    Raises:
        TypeError: `x` is not a floating-point tensor.
        ValueError: `approximate` is unknown.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

    Example:
        >>> tigon.gelu(torch.tensor([-1.0, 0.0, 3.0]), approximate="tanh")
        tensor([-0.1588,  0.0000,  2.9964])
    """
    checks.tensor("gelu", x=x)
    checks.floating("gelu", x=x)
    checks.choice("gelu", "approximate", approximate, tuple(KINDS))
    return _gelu(x, approximate)


@recomputed_by_call
def _gelu(x: Tensor, approximate: str) -> Tensor:
    if runs_kernels(x) and x.dim() and x.shape[-1]:
        return _GELU.apply(x, KINDS[approximate])
    return gelu_reference(x, approximate)
