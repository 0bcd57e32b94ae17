r"""The logarithm of the decay of a gated delta rule, from a projection of the hidden states.

    g   = -exp(A) * softplus(x),  x = a + b               (fp32)
    da  = -dg * exp(A) * s(x),    db = sum_rows(da)
    dA  = sum_rows(dg * g)

s is the logistic function. Stock code runs seven kernels forward and about ten backward for these few numbers, and a
small batch waits for the host at each of them.

Shapes: M = rows (all leading dimensions), H = heads.

Source: Gu and Dao, "Mamba", arXiv:2312.00752; Yang et al., "Gated Delta Networks", arXiv:2412.06464.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.norms.row_sums import sum_rows
from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.device import cdiv, next_power_of_2, runs_kernels
from tigon.runtime.launch import Plan, launcher
from tigon.runtime.op import Node
from tigon.runtime.rows import dense_rows

# The elements of a tile, and the largest number of programs of the backward, each of which has partial sums. They have
# not been tuned: the tensors are small.
TILE, MAX_PROGRAMS = 1024, 256


def log_decay_reference(a: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """Compute `log_decay` in eager torch, for devices without Triton."""
    return -a_log.float().exp() * F.softplus(a.float() + bias)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _load_row(ptr, cols, H):
    return tl.load(ptr + cols, cols < H, 0.0).to(tl.float32)[None, :]


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), precise for small results too."""
    e = tl.exp(-tl.abs(x))
    total = 1.0 + e
    # log(total) / (total - 1) hardly depends on the rounding of total.
    is_one = total == 1.0
    log_total = tl.where(is_one, e, tl.log(total) * (e / tl.where(is_one, 1.0, total - 1.0)))
    return tl.maximum(x, 0.0) + log_total


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    a_ptr, a_log_ptr, bias_ptr, g_ptr,  # [M, H], [H], [H], [M, H] fp32
    M, stride_a, H, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of g."""
    rows, cols = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_H)
    mask = (rows < M) & (cols < H)[None, :]
    x = tl.load(a_ptr + rows * stride_a + cols[None, :], mask, 0.0).to(tl.float32) + _load_row(bias_ptr, cols, H)
    tl.store(g_ptr + rows * H + cols[None, :], -tl.exp(_load_row(a_log_ptr, cols, H)) * softplus(x), mask)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dg_ptr, a_ptr, a_log_ptr, bias_ptr, da_ptr, da_log_ptr, dbias_ptr,  # the last two are [P, H] fp32 or None
    M, stride_dg, stride_a, H, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute da of the rows of a program, and its partial sums of dA and db if they are needed."""
    pid, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    bias, rate = _load_row(bias_ptr, cols, H), -tl.exp(_load_row(a_log_ptr, cols, H))
    if da_log_ptr is not None:
        da_log, dbias = tl.zeros([BLOCK_M, BLOCK_H], tl.float32), tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < M) & (cols < H)[None, :]
        x = tl.load(a_ptr + rows * stride_a + cols[None, :], mask, 0.0).to(tl.float32) + bias
        dg = tl.load(dg_ptr + rows * stride_dg + cols[None, :], mask, 0.0)
        da = dg * rate * tl.sigmoid(x)
        tl.store(da_ptr + rows * H + cols[None, :], da, mask)
        if da_log_ptr is not None:
            # A masked dg is 0, and so are its terms.
            da_log += dg * rate * softplus(x)
            dbias += da
    if da_log_ptr is not None:
        tl.store(da_log_ptr + pid * H + cols, tl.sum(da_log, 0), cols < H)
        tl.store(dbias_ptr + pid * H + cols, tl.sum(dbias, 0), cols < H)


# --- launchers (any strides, no autograd) --------------------------------------------------------


@functools.lru_cache(4096)
def _plan(kernel: JITFunction, m: int, programs: int, h: int, *strides: int) -> Plan:
    return Plan(kernel, programs, m, *strides, h, BLOCK_M=_tile_rows(h), BLOCK_H=next_power_of_2(h), num_warps=4)


def _tile_rows(h: int) -> int:
    return max(1, TILE // next_power_of_2(h))


def _empty_forward(a: Tensor) -> Tensor:
    return torch.empty_like(a, dtype=torch.float32, memory_format=torch.contiguous_format)


@launcher(fake=lambda a, a_log, bias: _empty_forward(a))
def log_decay_forward(a: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """Return g [..., H] in fp32."""
    g, h = _empty_forward(a), a.shape[-1]
    rows, stride = dense_rows(a)
    m = a.numel() // h
    _plan(_forward_kernel, m, cdiv(m, _tile_rows(h)), h, stride).launch(rows, a_log.contiguous(), bias.contiguous(), g)
    return g


def _empty_backward(
    dg: Tensor, a: Tensor, a_log: Tensor, bias: Tensor, needs_parameters: bool
) -> tuple[Tensor, Any, Any]:
    """Allocate da, dA and db. The last two are None if they are not needed."""
    da = torch.empty_like(a, memory_format=torch.contiguous_format)
    return (da, torch.empty_like(a_log), torch.empty_like(bias)) if needs_parameters else (da, None, None)


@launcher(fake=_empty_backward)
def log_decay_backward(
    dg: Tensor, a: Tensor, a_log: Tensor, bias: Tensor, needs_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return da [..., H], dA [H] and db [H]. The last two are None if no parameter needs a gradient, as with LoRA."""
    da, da_log, dbias = _empty_backward(dg, a, a_log, bias, needs_parameters)
    h = a.shape[-1]
    m = a.numel() // h
    (dg, stride_dg), (a, stride_a) = dense_rows(dg), dense_rows(a)
    programs = min(MAX_PROGRAMS, cdiv(m, _tile_rows(h)))
    parts: Any = dg.new_empty((2, programs, h), dtype=torch.float32) if needs_parameters else (None, None)
    plan = _plan(_backward_kernel, m, programs, h, stride_dg, stride_a)
    plan.launch(dg, a, a_log.contiguous(), bias.contiguous(), da, *parts)
    if needs_parameters:
        sum_rows(parts[0], da_log, parts[1], dbias)
    return da, da_log, dbias


# --- autograd ------------------------------------------------------------------------------------


class _LogDecay(Node):
    @staticmethod
    def forward(ctx: Any, a: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(a, a_log, bias)
        return log_decay_forward(a, a_log, bias)

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor | None, ...]:
        a, a_log, bias = ctx.saved_tensors
        return log_decay_backward(dg, a, a_log, bias, any(ctx.needs_input_grad[1:3]))


def log_decay(a: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """Return -exp(a_log) * softplus(a + bias) [..., H] in fp32, for a [..., H], a_log [H] and bias [H]."""
    if not runs_kernels(a, a_log, bias) or not a.numel():
        return log_decay_reference(a, a_log, bias)
    return _LogDecay.apply(a, a_log, bias)
