r"""One step of AdamW with compact states, in one pass over memory: the formulas are in `adamw_kernels` and `formats`.

The kernel decodes moments and master weights in registers, updates them in fp32, and encodes them again. With bf16
parameters and gradients, moments of 8 bits and a master weight of 24 bits, a step reads 7 bytes of each parameter and
writes 5, besides 0.13 bytes of scales.

The gradient is multiplied by a factor in memory, if there is one, which clips it to a norm.

Shapes: p, g, m, v and the master weight have N elements without gaps, the scales have ceil(N / 128).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.optim import formats
from tigon.ops.optim.adamw_kernels import (
    TYPES,
    TensorTable,
    log_of,
    one_minus_exp,
    tensor_at,
    update_table,
)
from tigon.ops.optim.compact_reference import CompactTensors
from tigon.ops.optim.formats import NAN_BITS, QUANT_BLOCK
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, device_of
from tigon.runtime.launch import in_order, launch, on_device
from tigon.runtime.tuning import LaunchConfig

KERNEL_TYPES = {**TYPES, torch.int8: tl.int8, torch.uint8: tl.uint8}


# --- configuration -------------------------------------------------------------------------------


class CompactProblem(NamedTuple):
    """The size that the launch parameters of a step depend on."""

    # Bytes of an element of the tensor with the widest elements.
    itemsize: int


@dataclass(frozen=True)
class CompactConfig(LaunchConfig):
    """Launch parameters. A program updates `block` elements, a multiple of 128."""

    block: int
    num_warps: int
    # This many consecutive programs share an entry of the map from programs to tensors, as in `AdamWConfig`.
    span: int

    @staticmethod
    def heuristic(problem: CompactProblem, device: Device) -> "CompactConfig":
        """Return a block with which each of 128 threads accesses 16 bytes of the widest tensor once.

        With narrower accesses of the other tensors, all tensors have the same elements in each thread, so no values
        are exchanged between threads except the maxima of blocks of 128.
        """
        return CompactConfig(block=4 * 32 * 16 // max(problem.itemsize, 2), num_warps=4, span=8)


# --- kernel --------------------------------------------------------------------------------------

NAN = tl.constexpr(NAN_BITS)
COLUMNS_OF_A_ROW = tl.constexpr(QUANT_BLOCK)
INDEX_FACTOR = tl.constexpr(formats.INDEX_FACTOR)
STEP_FACTOR = tl.constexpr(formats.STEP_FACTOR)


# The sum of this number and an fp32 number x is rounded to an integer. Its low bits are those of x, rounded to nearest.
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def _inverse(x):
    """Return 1 / x for x >= 0 to a few units in the last place of fp32, or a large number for x < 1e-36.

    A division takes 8 instructions, and the step is as much bound by instructions as by memory.
    """
    root = tl.rsqrt(tl.maximum(x, 1e-36))
    return root * root


@triton.jit
def _rounded_bits(x):
    """Return x rounded to the nearest integer in the lowest byte of an int32, for |x| < 2^22."""
    return (x + ROUNDING).to(tl.int32, bitcast=True)


@triton.jit
def _one_plus_dither(start, step, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return 1 + u for the elements from `start` on [ROWS, COLUMNS], where u is the dither of `formats`."""
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    count = (tl.full((1, 1), 0.0, tl.float32) + step).to(tl.int32).to(tl.uint32, bitcast=True)
    first = start.to(tl.uint32) * INDEX_FACTOR + count * STEP_FACTOR
    words = index.to(tl.uint32) * INDEX_FACTOR + first
    # The upper 15 bits of a word are the first ones of a fraction, and the next bit is 1.
    return (((words >> 9) & 0x7FFF00) | 0x3F800080).to(tl.float32, bitcast=True)


@triton.jit
def _random_halves(start, key, step, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return random numbers in 0..65535 [ROWS, COLUMNS] for the elements from `start` on, a multiple of 8."""
    GROUPS: tl.constexpr = COLUMNS // 8
    group = tl.arange(0, ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    group = group.to(tl.uint32) + (start // 8).to(tl.uint32)
    zero = group * 0
    count = (zero.to(tl.float32) + step).to(tl.int32).to(tl.uint32, bitcast=True)
    a, b, c, d = tl.philox(0, group, zero + key.to(tl.uint32), count, zero)
    # The words in their order, each with its low half first.
    low = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))
    high = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS)).to(tl.int32)


@triton.jit
def _finite_bits(p):
    """Return the bits of fp32 numbers as int32, with one pattern for all NaNs."""
    return tl.where(p == p, p.to(tl.int32, bitcast=True), NAN)


@triton.jit
def _compact_step_kernel(
    # For each tensor: the addresses of p, g, m, v, the scales of m and of v, the master weight and the step's number,
    # the key of its random numbers, N, the first span and the number of spans.
    rows_ptr,  # [tensors, 12] int64
    tensor_of_span_ptr,  # [spans] int32: the index of the tensor of each span
    lr_ptr,  # [], or None if the number `lr` is used
    factor_ptr,  # [] fp32: the factor of the gradients, or None
    # correction1 is 1 / (1 - beta1^t), and correction2 is 1 / sqrt(1 - beta2^t), unless the step t is in memory.
    step, correction1, correction2, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,  # the dtypes of p, g, m and v
    QUANTISED: tl.constexpr,  # True if the moments are codes
    MASTER: tl.constexpr,  # "", "fp32" or "bf16+8"
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,  # True if all addresses are multiples of 16 bytes, and all N are multiples of 16
    STEPS: tl.constexpr,  # True if the numbers of the steps are in memory; otherwise all are `step`
    MAXIMIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor, which the program finds in the table."""
    COLUMNS: tl.constexpr = COLUMNS_OF_A_ROW
    ROWS: tl.constexpr = BLOCK // COLUMNS
    # This code rounds bf16 parameters itself, and then accesses them as int16.
    IS_INT: tl.constexpr = STOCHASTIC or MASTER == "bf16+8"
    program = tl.program_id(0)
    row_ptr = rows_ptr + tl.load(tensor_of_span_ptr + program // SPAN) * 12
    start = (program - tl.load(row_ptr + 10) * SPAN) * BLOCK  # int64
    n = tl.load(row_ptr + 9)
    if ALIGNED:
        # Then the mask has one value for 16 elements, and accesses are wide.
        n = tl.multiple_of(n, 16)
    if start >= n:
        return
    if STEPS:
        step = tl.load(tl.load(row_ptr + 7).to(tl.pointer_type(tl.float32)))
        correction1 = 1.0 / one_minus_exp(step * log_beta1)
        correction2 = 1.0 / tl.sqrt(one_minus_exp(step * log_beta2))
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    index = start + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    mask = index < n
    row_index = start // COLUMNS + tl.arange(0, ROWS)[:, None]
    row_mask = row_index * COLUMNS < n
    param_ptr = tensor_at(row_ptr, tl.int16 if IS_INT else P, ALIGNED) + index
    exp_avg_ptr = tensor_at(row_ptr + 2, M, ALIGNED) + index
    exp_avg_sq_ptr = tensor_at(row_ptr + 3, V, ALIGNED) + index
    exp_avg_scale_ptr = tensor_at(row_ptr + 4, tl.float32, ALIGNED) + row_index
    exp_avg_sq_scale_ptr = tensor_at(row_ptr + 5, tl.float32, ALIGNED) + row_index
    master_ptr = tensor_at(row_ptr + 6, tl.int8 if MASTER == "bf16+8" else tl.float32, ALIGNED) + index

    p = tl.load(param_ptr, mask=mask, other=0)
    g = tl.load(tensor_at(row_ptr + 1, G, ALIGNED) + index, mask=mask, other=0).to(tl.float32)
    m = tl.load(exp_avg_ptr, mask=mask, other=0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr, mask=mask, other=0).to(tl.float32)
    if MASTER == "bf16+8":
        correction = tl.load(master_ptr, mask=mask, other=0).to(tl.int32)
        # If something else has set a parameter to zero, a negative correction would carry into the sign: a NaN.
        correction = tl.where((p.to(tl.int32) & 0x7FFF) == 0, tl.maximum(correction, 0), correction)
        p = ((p.to(tl.int32) << 16) + (correction << 8)).to(tl.float32, bitcast=True)
    elif STOCHASTIC:
        p = (p.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        p = p.to(tl.float32)
        if MASTER == "fp32":
            # The master starts again from a parameter that something else has changed.
            master = tl.load(master_ptr, mask=mask, other=0)
            p = tl.where(master.to(P).to(tl.float32) == p, master, p)
    if QUANTISED:
        m = m * tl.load(exp_avg_scale_ptr, mask=row_mask, other=0)
        m = m * tl.abs(m)
        scale = tl.load(exp_avg_sq_scale_ptr, mask=row_mask, other=0)
        v = v * scale + 0.5 * scale
        v = v * v
        v = v * v
    if factor_ptr is not None:
        g = g * tl.load(factor_ptr)
    if MAXIMIZE:
        g = -g

    m = beta1 * m + complement1 * g
    v = beta2 * v + complement2 * (g * g)
    # p * (1 - decay) would round twice, and a decay is often as small as the last digit of fp32.
    p = p - (lr * weight_decay) * p
    if QUANTISED:
        # The fourth root of v is also what is encoded.
        fourth_root = tl.rsqrt(tl.rsqrt(v))
        inverse = _inverse((fourth_root * fourth_root) * correction2 + eps)
        p = p - (lr * correction1) * (m * inverse)
        root = m * tl.rsqrt(tl.maximum(tl.abs(m), 1e-36))
        maxima = tl.max(tl.abs(root), 1, keep_dims=True)
        tl.store(exp_avg_scale_ptr, maxima * (1.0 / 127.0), mask=row_mask)
        m = _rounded_bits(root * (127.0 * _inverse(maxima))).to(tl.int8)
        maxima = tl.max(fourth_root, 1, keep_dims=True)
        tl.store(exp_avg_sq_scale_ptr, maxima * (1.0 / 255.5), mask=row_mask)
        # The code is x + u rounded down, for x in [0, 255]. That is x - 3/2 + (1 + u) rounded to nearest. The quotient
        # of the maximum may be above 255.5 in its last digit, and the code 256 would wrap to 0.
        shifted = fourth_root * (255.5 * _inverse(maxima)) - 2.0
        shifted = tl.minimum(tl.maximum(shifted, -1.5), 253.5)
        v = _rounded_bits(shifted + _one_plus_dither(start, step, ROWS, COLUMNS)).to(tl.uint8)
    else:
        p = p - (lr * correction1) * (m / (tl.sqrt(v) * correction2 + eps))
    tl.store(exp_avg_ptr, m, mask=mask)
    tl.store(exp_avg_sq_ptr, v, mask=mask)
    if MASTER == "bf16+8":
        bits = _finite_bits(p) + 0x80
        tl.store(master_ptr, (bits >> 8).to(tl.int8), mask=mask)
        tl.store(param_ptr, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
    elif STOCHASTIC:
        bits = _finite_bits(p)
        halves = _random_halves(start, tl.load(row_ptr + 8), step, ROWS, COLUMNS)
        bits += tl.where((bits & 0x7F800000) != 0x7F800000, halves, 0)
        tl.store(param_ptr, (bits >> 16).to(tl.int16), mask=mask)
    else:
        if MASTER == "fp32":
            tl.store(master_ptr, p, mask=mask)
        tl.store(param_ptr, p, mask=mask)


# --- launcher ------------------------------------------------------------------------------------


class _CompactKind(NamedTuple):
    """The properties that all tensors of one launch share."""

    # The index of the device, or -1 for the CPU.
    device_index: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    # None without a master weight.
    master_dtype: torch.dtype | None
    # True if all addresses are multiples of 16 bytes, and all N are multiples of 16.
    is_aligned: bool
    # The number of the step, or None if it is in memory.
    step: float | None


def compact_step(
    parameters: Sequence[CompactTensors],
    lr: Tensor | float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    factor: Tensor | None = None,
    is_stochastic: bool = False,
    *,
    tables: dict[int, TensorTable] | None = None,
) -> None:
    """Update contiguous tensors in place. One launch updates all parameters that agree in dtypes and alignment.

    Args:
        parameters: The tensors of each parameter, on one device. A step that is an fp32 tensor on this device is read
            by the device; the host reads any other.
        lr: A number, or a tensor of one element in any dtype, which only the device reads.
        factor: [] fp32, a factor of all gradients, which only the device reads.
        is_stochastic: bf16 parameters without a master weight are rounded stochastically.
        tables: As in `adamw_step`.
    """
    tables = {} if tables is None else tables
    launches: dict[tuple, list[tuple[int, ...]]] = {}
    firsts: dict[tuple, Tensor] = {}
    for p, g, m, v, m_scale, v_scale, master, key, step in parameters:
        # A rank may have no part of a parameter.
        if not p.numel():
            continue
        device_index, number, step_address = p.get_device(), None, 0
        if isinstance(step, Tensor) and step.get_device() == device_index and step.dtype == torch.float32:
            step_address = step.data_ptr()
        else:
            number = float(step)
        pointers = [0 if x is None else x.data_ptr() for x in (p, g, m, v, m_scale, v_scale, master)]
        bits = p.numel()
        for pointer in pointers:
            bits |= pointer
        is_aligned = bits & 15 == 0
        master_dtype = None if master is None else master.dtype
        kind = device_index, p.dtype, g.dtype, m.dtype, v.dtype, master_dtype, is_aligned, number
        launches.setdefault(kind, []).append((*pointers, step_address, key, p.numel()))
        firsts.setdefault(kind, p)
    for position, (fields, tensors) in enumerate(launches.items()):
        kind, first = _CompactKind(*fields), firsts[fields]
        itemsize = max(dtype.itemsize for dtype in kind[1:6] if dtype is not None)
        config = CompactConfig.choose(CompactProblem(itemsize), device_of(first))
        table = tables[position] = update_table(tables.get(position), tensors, first.device, config.block * config.span)
        device_lr = lr.to(first.device, non_blocking=True) if isinstance(lr, Tensor) else float(lr)
        device_factor = None if factor is None else factor.to(first.device, non_blocking=True)
        _launch(
            table.rows, table.tensor_of_span, device_lr, device_factor, betas, eps, weight_decay, maximize,
            is_stochastic, kind, config,
        )  # fmt: skip


@on_device
def _launch(
    rows: Tensor,
    tensor_of_span: Tensor,
    lr: Tensor | float,
    factor: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    is_stochastic: bool,
    kind: _CompactKind,
    config: CompactConfig,
) -> None:
    """Update the tensors of one launch."""
    lr_ptr, lr_number = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    beta1, beta2 = betas
    step = kind.step or 1.0
    launch(
        _compact_step_kernel, tensor_of_span.numel() * config.span,
        *in_order(_compact_step_kernel)(
            rows_ptr=rows, tensor_of_span_ptr=tensor_of_span, lr_ptr=lr_ptr, factor_ptr=factor,
            step=step, correction1=1.0 / (1.0 - beta1**step), correction2=1.0 / math.sqrt(1.0 - beta2**step),
            lr=lr_number, beta1=float(beta1), beta2=float(beta2), complement1=1.0 - beta1, complement2=1.0 - beta2,
            log_beta1=log_of(beta1), log_beta2=log_of(beta2),
            weight_decay=float(weight_decay), eps=float(eps),
        ),
        P=KERNEL_TYPES[kind.param_dtype], G=KERNEL_TYPES[kind.grad_dtype],
        M=KERNEL_TYPES[kind.exp_avg_dtype], V=KERNEL_TYPES[kind.exp_avg_sq_dtype],
        QUANTISED=kind.exp_avg_dtype == torch.int8,
        MASTER={None: "", torch.float32: "fp32", torch.int8: "bf16+8"}[kind.master_dtype],
        STOCHASTIC=is_stochastic and kind.param_dtype == torch.bfloat16 and kind.master_dtype is None,
        ALIGNED=kind.is_aligned, STEPS=kind.step is None, MAXIMIZE=maximize,
        SPAN=config.span, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
