r"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): one step, in place, in one pass over memory.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    p <- (1 - lr weight_decay) p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

t counts steps from 1. Everything in fp32, each of p, m and v rounded once: p moves by m and v as they are before they
are rounded. 1 - beta^t is -expm1(t log beta), because in fp32 the difference from one would lose its digits in the
first steps; for the same reason the host gives 1 - beta and log beta, which it has in fp64.

Shapes: p, g, m, v of one parameter have N elements, without gaps. A step reads p, g, m, v and writes p, m, v: in bf16
14 bytes a parameter. One launch steps all parameters: it finds them by a table of their addresses.
"""

import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import launch, on_device
from tigon.runtime.torch_private import current_raw_stream
from tigon.runtime.tuning import LaunchConfig

__all__ = ["AdamWConfig", "AdamWProblem", "Table", "adamw_reference", "adamw_step"]

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# --- reference -----------------------------------------------------------------------------------


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """p, g, m, v [...] -> p, m, v after step number `step`, in fp32, or fp64 where p is: the tests' ground truth."""
    wide = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(wide) for x in (param, grad, exp_avg, exp_avg_sq))
    g = -g if maximize else g
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = v.sqrt() / math.sqrt(1 - betas[1] ** step) + eps
    return p - lr * weight_decay * p - lr / (1 - betas[0] ** step) * m / denominator, m, v


# --- configuration -------------------------------------------------------------------------------


class AdamWProblem(NamedTuple):
    """What the launch parameters of a step depend on."""

    itemsize: int  # bytes of an element of the parameters


@dataclass(frozen=True)
class AdamWConfig(LaunchConfig):
    """Launch parameters: a program takes `block` elements.

    `span` programs in a row share an entry of the map from programs to tensors: for 8e9 parameters in bf16 that makes
    it 4 MB, and a tensor's last span at most 7 programs that have nothing to do.
    """

    block: int
    num_warps: int
    span: int

    @staticmethod
    def heuristic(problem: AdamWProblem, device: Device) -> "AdamWConfig":
        # One access of 16 bytes a thread, of 128, for each of the seven tensors.
        return AdamWConfig(block=4 * 32 * 16 // problem.itemsize, num_warps=4, span=8)


# --- kernel --------------------------------------------------------------------------------------


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, to fp32's last digits: by its series where the difference would lose them."""
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series))
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * series))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _update(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, mask,
    step, lr, beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps,
    MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """One block: pointers to its elements, and which of them are inside (None: all)."""
    g = tl.load(grad_ptr, mask=mask).to(tl.float32)
    m = tl.load(exp_avg_ptr, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr, mask=mask).to(tl.float32)
    p = tl.load(param_ptr, mask=mask).to(tl.float32)
    step_size = lr / _one_minus_exp(step * log_beta1)
    scale = 1.0 / tl.sqrt(_one_minus_exp(step * log_beta2))
    decay = lr * weight_decay
    if MAXIMIZE:
        g = -g
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    # Not p * (1 - decay), which rounds twice: a decay is often of the size of fp32's last digit.
    p = p - decay * p
    p = p - step_size * (m / (tl.sqrt(v) * scale + eps))
    tl.store(param_ptr, p, mask=mask)
    tl.store(exp_avg_ptr, m, mask=mask)
    tl.store(exp_avg_sq_ptr, v, mask=mask)


@triton.jit
def _block_at(address_ptr, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the block at element `start` of the tensor whose address is there."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The compiler cannot know it of an address that it loads, and without it has no accesses of 16 bytes.
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + tl.arange(0, BLOCK)


@triton.jit
def _step_kernel(
    rows_ptr,  # [tensors, 8] int64: the addresses of p, g, m, v and the step's number; N; the first span; spans
    owners_ptr,  # [spans] int32: the tensor of each
    lr_ptr,  # [], or None: the number `lr`
    step, lr, beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,  # dtypes
    ALIGNED: tl.constexpr,  # all addresses to 16 bytes
    STEPS: tl.constexpr,  # whether the steps' numbers are in memory; else all are `step`
    MAXIMIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_ptr = rows_ptr + tl.load(owners_ptr + program // SPAN) * 8
    start = (program - tl.load(row_ptr + 6) * SPAN) * BLOCK  # int64
    left = tl.load(row_ptr + 5) - start
    if left > 0:
        param_ptr = _block_at(row_ptr, start, P, ALIGNED, BLOCK)
        grad_ptr = _block_at(row_ptr + 1, start, G, ALIGNED, BLOCK)
        exp_avg_ptr = _block_at(row_ptr + 2, start, M, ALIGNED, BLOCK)
        exp_avg_sq_ptr = _block_at(row_ptr + 3, start, V, ALIGNED, BLOCK)
        if STEPS:
            step = tl.load(tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32)))
        if lr_ptr is not None:
            lr = tl.load(lr_ptr).to(tl.float32)
        # A block that is full needs no mask, and so has accesses of 16 bytes whatever N is.
        if left >= BLOCK:
            _update(
                param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, None,
                step, lr, beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE,
            )  # fmt: skip
        else:
            _update(
                param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, tl.arange(0, BLOCK) < left,
                step, lr, beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE,
            )  # fmt: skip


# --- launcher ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """What one launch has to know of its tensors, on their device."""

    made_of: tuple  # all that it depends on
    rows: Tensor  # [tensors, 8] int64, as the kernel reads them
    owners: Tensor  # [spans] int32


def adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor | float],
    lr: Tensor | float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    *,
    tables: dict[int, Table] | None = None,
) -> None:
    """Of each tensor p, g, m, v [...], fp32 | bf16 | fp16, contiguous on one device: p, m and v become those after
    step number `steps[i]`, all in one launch, or one for each that differs in dtypes, device, alignment or number.

    A tensor of one fp32 element on a parameter's device, as `steps[i]` or, of any dtype, as `lr`, only the device
    reads. `tables` is the caller's to keep: while the tensors stay where they are, nothing is copied to the device.
    """
    tables = {} if tables is None else tables
    launches: dict[tuple, list[int]] = {}
    for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        device, number, at_step = p.get_device(), None, 0
        if isinstance(step, Tensor) and step.get_device() == device and step.dtype == torch.float32:
            at_step = step.data_ptr()
        else:
            number = float(step)
        at = p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()
        aligned = (at[0] | at[1] | at[2] | at[3]) & 15 == 0
        kind = device, p.dtype, g.dtype, m.dtype, v.dtype, aligned, number
        launches.setdefault(kind, []).extend((*at, at_step, p.numel()))
    numbers = (
        float(betas[0]), float(betas[1]), 1.0 - betas[0], 1.0 - betas[1], _log(betas[0]), _log(betas[1]),
        float(weight_decay), float(eps),
    )  # fmt: skip
    for position, (kind, found) in enumerate(launches.items()):
        index, *dtypes, aligned, number = kind
        device = torch.device("cuda", index) if index >= 0 else params[0].device
        first = next(p for p in params if p.get_device() == index)
        config = AdamWConfig.choose(AdamWProblem(dtypes[0].itemsize), device_of(first))
        table = tables[position] = _table(found, device, config.block * config.span, tables.get(position))
        rate = lr.to(device, non_blocking=True) if isinstance(lr, Tensor) else float(lr)
        _launch(table.rows, table.owners, rate, number, numbers, dtypes, aligned, maximize, config)


def _table(found: list[int], device: torch.device, size: int, before: Table | None) -> Table:
    """The table of so many elements a span: addresses and lengths found, six numbers a tensor. `before` if it is so."""
    # Another stream's copy may still be on its way.
    stream = current_raw_stream(device.index) if device.type == "cuda" else 0
    made_of = found, device, size, stream
    if before is not None and before.made_of == made_of:
        return before
    rows, first = array("q"), 0
    for i in range(0, len(found), 6):
        spans = cdiv(found[i + 5], size)
        rows.extend((*found[i : i + 6], first, spans))
        first += spans
    rows = torch.frombuffer(rows, dtype=torch.int64).view(-1, 8)
    # Pinned, so that the copy does not wait for the device; torch keeps that memory until the copy is over.
    rows = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
    if before is not None and before.made_of[1:] == made_of[1:] and before.made_of[0][5::6] == found[5::6]:
        return Table(made_of, rows, before.owners)
    return Table(made_of, rows, torch.repeat_interleave(rows[:, 7].int(), output_size=first))


@on_device
def _launch(rows, owners, lr, number, numbers, dtypes, aligned, maximize, config) -> None:
    lr_ptr, lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    p, g, m, v = (TYPES[x] for x in dtypes)
    launch(
        _step_kernel, owners.numel() * config.span, rows, owners, lr_ptr, number or 0.0, lr, *numbers,
        P=p, G=g, M=m, V=v, ALIGNED=aligned, STEPS=number is None, MAXIMIZE=maximize,
        SPAN=config.span, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
