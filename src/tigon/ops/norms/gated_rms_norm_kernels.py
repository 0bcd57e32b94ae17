r"""The kernels of the gated RMS norm. The docstring of `gated_rms_norm.py` has the formulas.

Shapes: M = rows (all leading dimensions), N = features, G = features of a group, P = programs of the backward.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.norms.row_sums import sum_rows
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, cdiv, device_of, next_power_of_2
from tigon.runtime.launch import in_order, launch, launcher
from tigon.runtime.rows import dense_rows
from tigon.runtime.tuning import LaunchConfig, rung

# The backward keeps three rows and a sum in registers. Wider groups do not fit, so the reference computes them.
MAX_GROUP_SIZE = 8192


# The first number is the largest size of a group of a rung. The others are the elements of a tile and the warps of the
# forward, the same of the backward, and the programs of the backward per multiprocessor. Measured on an H200 in bf16.
LADDER = (
    (512, (2048, 4, 2048, 8, 2)),
    (1024, (2048, 2, 1024, 4, 4)),
    (2048, (2048, 4, 2048, 8, 2)),
    (4096, (4096, 4, 8192, 8, 1)),
    (MAX_GROUP_SIZE, (8192, 8, 8192, 16, 1)),
)


@dataclass(frozen=True)
class GatedNormConfig(LaunchConfig):
    block_n: int  # Features of a tile
    # Rows of a tile of the forward, and warps of its program.
    block_m: int
    num_warps: int
    # Rows of a tile of the backward, and warps of its program.
    backward_block_m: int
    backward_warps: int
    num_stages: int  # Pipeline stages of the backward's loop over rows
    programs: int  # The largest number of programs of the backward. Each program computes one partial dw of one group.
    keeps_w: bool  # True if w stays in registers during the backward's loop. Otherwise it is loaded for every tile.

    @staticmethod
    def heuristic(problem: tuple[int, int], device: Device) -> "GatedNormConfig":
        """Return the parameters for groups of up to `MAX_GROUP_SIZE` features. The problem is the size of a group, and
        the bytes of an element of x."""
        group_size, itemsize = problem
        block_n = next_power_of_2(group_size)
        elements, num_warps, backward_elements, backward_warps, programs = rung(LADDER, block_n)
        # The pipeline holds tiles of dy, x and the gate for each stage but the last.
        pipeline_bytes = programs * 2 * 3 * backward_elements * itemsize
        return GatedNormConfig(
            block_n=block_n, block_m=min(16, elements // block_n), num_warps=min(num_warps, device.max_warps),
            backward_block_m=min(16, backward_elements // block_n),
            backward_warps=min(backward_warps, device.max_warps),
            num_stages=3 if pipeline_bytes <= 0.6 * device.shared_memory else 1,
            programs=programs * device.multiprocessors, keeps_w=block_n < 4096,
        )  # fmt: skip

    def count_programs(self, m: int, groups: int) -> int:
        """Return how many programs share the `m` rows of one group, if each gets at least two tiles."""
        tiles, limit = cdiv(m, self.backward_block_m), max(1, self.programs // groups)
        return cdiv(tiles, max(2, cdiv(tiles, limit)))


@triton.jit
def _activate(gate, IS_SILU: tl.constexpr):
    """Return act(gate), and sigmoid(gate) from which `_slope` computes the derivative, in fp32."""
    sigmoid = tl.sigmoid(gate)
    factor = sigmoid
    if IS_SILU:
        factor = gate * sigmoid
    return factor, sigmoid


@triton.jit
def _slope(factor, sigmoid, IS_SILU: tl.constexpr):
    """Return act'(gate) from act(gate) and sigmoid(gate)."""
    slope = factor * (1.0 - sigmoid)
    if IS_SILU:
        slope += sigmoid
    return slope


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, gate_ptr, w_ptr,  # [M, N], [M, N], [N] or None
    y_ptr, rstd_ptr,  # [M, N], fp32 [M, N / G]
    stride_x, stride_gate,
    M, N, G, eps, offset,
    IS_SILU: tl.constexpr, GATE_FIRST: tl.constexpr, ROUND_FIRST: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalise and gate one group of features of a tile of rows."""
    groups = N // G
    group = tl.program_id(0) % groups
    rows = ((tl.program_id(0) // groups).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    inside = EVEN | (tl.arange(0, BLOCK_N)[None, :] < G)
    cols = group * G + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & inside

    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)  # [BM, BN]
    dtype = x.dtype
    gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    factor, _ = _activate(gate, IS_SILU)
    z = x.to(tl.float32)
    if GATE_FIRST:
        z *= factor
    rstd = tl.rsqrt(tl.sum(z * z, axis=1, keep_dims=True) / G + eps)
    tl.store(rstd_ptr + rows * groups + group, rstd, mask=rows < M)
    y = z * rstd
    if ROUND_FIRST:
        y = y.to(dtype).to(tl.float32)
    if w_ptr is not None:
        y *= offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        y *= factor
    tl.store(y_ptr + rows * N + cols, y, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, rstd_ptr,  # [M, N], [M, N], [M, N], [N] or None, fp32 [M, N / G]
    dx_ptr, dgate_ptr, dw_ptr,  # [M, N], [M, N], fp32 [P, N]; None if not needed
    stride_dy, stride_x, stride_gate,
    M, N, G, offset,
    IS_SILU: tl.constexpr, GATE_FIRST: tl.constexpr, KEEPS_W: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one group of features of the rows of a program, and its partial sum of dw."""
    groups = N // G
    group = tl.program_id(0) % groups
    pid = (tl.program_id(0) // groups).to(tl.int64)
    inside = EVEN | (tl.arange(0, BLOCK_N)[None, :] < G)
    cols = group * G + tl.arange(0, BLOCK_N)[None, :]
    w = 1.0
    if KEEPS_W and w_ptr is not None:
        w = offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)  # [1, BN]
    # The rows of this sum are added once, after the loop.
    if dw_ptr is not None:
        dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0) // groups, num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & inside
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * groups + group, mask=rows < M, other=0.0)  # [BM, 1]
        factor, sigmoid = _activate(gate, IS_SILU)

        if GATE_FIRST:
            z_hat = x * factor * rstd
            dscaled = dy
        else:
            z_hat = x * rstd
            dscaled = dy * factor
        if dw_ptr is not None:
            dw += dscaled * z_hat
        scale = w
        if not KEEPS_W and w_ptr is not None:
            scale = offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        g = dscaled * scale
        dz = rstd * (g - z_hat * (tl.sum(g * z_hat, axis=1, keep_dims=True) / G))
        if GATE_FIRST:
            dx = dz * factor
            dgate = dz * x * _slope(factor, sigmoid, IS_SILU)
        else:
            dx = dz
            dgate = dy * z_hat * scale * _slope(factor, sigmoid, IS_SILU)
        if dx_ptr is not None:
            tl.store(dx_ptr + rows * N + cols, dx, mask=mask)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + rows * N + cols, dgate, mask=mask)

    if dw_ptr is not None:
        tl.store(dw_ptr + pid * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=inside)


class GatedNormOptions(NamedTuple):
    group_size: int
    eps: float
    offset: float
    is_silu: bool  # True for SiLU, and False for the logistic function
    gate_first: bool  # True if the gate multiplies x before the norm
    round_first: bool  # True if the normalised value is rounded to the dtype of x before the weight multiplies it.


class NeededGatedNormGradients(NamedTuple):
    x: bool
    gate: bool
    weight: bool


def _empty_forward(x: Tensor, weight: Tensor | None, options: GatedNormOptions) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    if options.gate_first and options.round_first and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty((x.numel() // x.shape[-1], x.shape[-1] // options.group_size), dtype=torch.float32)


@launcher(fake=_empty_forward)
def gated_norm_forward(
    x: Tensor, gate: Tensor, weight: Tensor | None, options: GatedNormOptions
) -> tuple[Tensor, Tensor]:
    """Return y [..., N], and the rstd [M, N / G] in fp32."""
    group_size, eps, offset, is_silu, gate_first, round_first = options
    y, rstd = _empty_forward(x, weight, options)
    m, groups = rstd.shape
    config = GatedNormConfig.choose((group_size, x.element_size()), device_of(x))
    x, stride_x = dense_rows(x)
    gate, stride_gate = dense_rows(gate)
    launch(
        _forward_kernel, cdiv(m, config.block_m) * groups,
        *in_order(_forward_kernel)(
            x_ptr=x, gate_ptr=gate, w_ptr=weight if weight is None else weight.contiguous(), y_ptr=y, rstd_ptr=rstd,
            stride_x=stride_x, stride_gate=stride_gate,
            M=m, N=groups * group_size, G=group_size, eps=eps, offset=offset,
        ),
        IS_SILU=is_silu, GATE_FIRST=gate_first, ROUND_FIRST=round_first, EVEN=group_size == config.block_n,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y, rstd


def _empty_backward(
    x: Tensor, gate: Tensor, weight: Tensor | None, needs: NeededGatedNormGradients
) -> tuple[Any, Any, Any]:
    """Allocate the gradients that are needed. The others are None."""
    dx, dgate, dw = (
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed and t is not None else None
        for t, needed in zip((x, gate, weight), needs, strict=True)
    )
    return dx, dgate, dw


@launcher(fake=_empty_backward)
def gated_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, rstd: Tensor, options: GatedNormOptions,
    needs: NeededGatedNormGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx and dgate [..., N] and dw [N]. A gradient that is not needed is None."""
    dx, dgate, dw = _empty_backward(x, gate, weight, needs)
    m, groups = rstd.shape
    n = x.shape[-1]
    config = GatedNormConfig.choose((n // groups, x.element_size()), device_of(x))
    dy, stride_dy = dense_rows(dy)
    x, stride_x = dense_rows(x)
    gate, stride_gate = dense_rows(gate)
    programs = config.count_programs(m, groups)
    dw_parts: Any = None if dw is None else x.new_empty((programs, n), dtype=torch.float32)
    launch(
        _backward_kernel, programs * groups,
        *in_order(_backward_kernel)(
            dy_ptr=dy, x_ptr=x, gate_ptr=gate, w_ptr=weight if weight is None else weight.contiguous(), rstd_ptr=rstd,
            dx_ptr=dx, dgate_ptr=dgate, dw_ptr=dw_parts,
            stride_dy=stride_dy, stride_x=stride_x, stride_gate=stride_gate,
            M=m, N=n, G=n // groups, offset=options.offset,
        ),
        IS_SILU=options.is_silu, GATE_FIRST=options.gate_first, KEEPS_W=config.keeps_w,
        EVEN=n // groups == config.block_n,
        BLOCK_M=config.backward_block_m, BLOCK_N=config.block_n, STAGES=config.num_stages,
        num_warps=config.backward_warps,
    )  # fmt: skip
    if dw is not None:
        sum_rows(dw_parts, dw)
    return dx, dgate, dw
