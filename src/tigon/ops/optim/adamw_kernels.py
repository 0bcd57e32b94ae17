r"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): one step, in place, in one pass over memory.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    p <- (1 - lr weight_decay) p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

t counts steps from 1. The kernel decodes moments and master weights (`formats`) in registers, computes in fp32 and
rounds each of p, m and v once: p is computed from m and v before they are rounded. 1 - beta^t is -expm1(t log beta),
because the difference from one would lose its digits in fp32 in the first steps. For the same reason the host computes
1 - beta and log beta, in fp64. The gradient is multiplied by a factor in memory, if there is one, which clips it.

Shapes: p, g, m, v and the master weight of one parameter have N elements without gaps, the scales of 8-bit moments have
ceil(N / 128). A step of bf16 tensors moves 14 bytes for each parameter: it reads p, g, m, v and writes p, m, v. With
moments of 8 bits and a master weight of 24 bits, it moves 12 bytes, besides 0.13 bytes of scales. One launch updates
all parameters that agree in dtypes. It finds them in a table of their addresses.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.optim import formats
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors
from tigon.ops.optim.formats import NAN_BITS, QUANT_BLOCK
from tigon.ops.optim.tensor_table import NUM_WARPS, TYPES, TensorTable, block_size, tensor_at, update_table
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.launch import in_order, launch, on_device

# This many consecutive programs share an entry of the map from programs to tensors. With 8 programs the map of 8e9
# parameters in bf16 takes 4 MB, and at most 7 programs of a tensor's last span do nothing.
SPAN = 8

NAN = tl.constexpr(NAN_BITS)
COLUMNS_OF_A_ROW = tl.constexpr(QUANT_BLOCK)
INDEX_FACTOR = tl.constexpr(formats.INDEX_FACTOR)
STEP_FACTOR = tl.constexpr(formats.STEP_FACTOR)
# The sum of this number and an fp32 number x is rounded to an integer. Its low bits are those of x, rounded to nearest.
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def _one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0 with all digits of fp32, by a series where the difference would lose digits."""
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series))
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * series))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _inverse(x):
    """Return 1 / x for x >= 0 to a few units in the last place of fp32, or a large number for x < 1e-36. A division
    takes 8 instructions, and instructions bound a step with codes as much as memory does."""
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
def _load(ptr, mask):
    """Load elements. Those outside of the mask, which may be None, are zero."""
    if mask is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0)


@triton.jit
def _update(
    row_ptr, start, mask, row_mask, factor_ptr,
    step, correction1, correction2, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, STEPS: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block [ROWS, COLUMNS] of one tensor. The masks are None if all elements are inside the tensor."""
    COLUMNS: tl.constexpr = COLUMNS_OF_A_ROW
    ROWS: tl.constexpr = BLOCK // COLUMNS
    QUANTISED: tl.constexpr = tl.int8 == M
    # This code rounds bf16 parameters itself, and then accesses them as int16.
    IS_INT: tl.constexpr = STOCHASTIC or MASTER == "bf16+8"
    index = start + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    row_index = start // COLUMNS + tl.arange(0, ROWS)[:, None]
    param_ptr = tensor_at(row_ptr, tl.int16 if IS_INT else P, ALIGNED) + index
    exp_avg_ptr = tensor_at(row_ptr + 2, M, ALIGNED) + index
    exp_avg_sq_ptr = tensor_at(row_ptr + 3, V, ALIGNED) + index
    exp_avg_scale_ptr = tensor_at(row_ptr + 4, tl.float32, ALIGNED) + row_index
    exp_avg_sq_scale_ptr = tensor_at(row_ptr + 5, tl.float32, ALIGNED) + row_index
    master_ptr = tensor_at(row_ptr + 6, tl.int8 if MASTER == "bf16+8" else tl.float32, ALIGNED) + index

    p = _load(param_ptr, mask)
    g = _load(tensor_at(row_ptr + 1, G, ALIGNED) + index, mask).to(tl.float32)
    m = _load(exp_avg_ptr, mask).to(tl.float32)
    v = _load(exp_avg_sq_ptr, mask).to(tl.float32)
    if MASTER == "bf16+8":
        correction = _load(master_ptr, mask).to(tl.int32)
        # If something else has set a parameter to zero, a negative correction would carry into the sign: a NaN.
        correction = tl.where((p.to(tl.int32) & 0x7FFF) == 0, tl.maximum(correction, 0), correction)
        p = ((p.to(tl.int32) << 16) + (correction << 8)).to(tl.float32, bitcast=True)
    elif STOCHASTIC:
        p = (p.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        p = p.to(tl.float32)
        if MASTER == "fp32":
            # The master starts again from a parameter that something else has changed.
            master = _load(master_ptr, mask)
            p = tl.where(master.to(P).to(tl.float32) == p, master, p)
    if QUANTISED:
        m = m * _load(exp_avg_scale_ptr, row_mask)
        m = m * tl.abs(m)
        scale = _load(exp_avg_sq_scale_ptr, row_mask)
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
        if STEPS:
            correction1 = 1.0 / _one_minus_exp(step * log_beta1)
            correction2 = 1.0 / tl.sqrt(_one_minus_exp(step * log_beta2))
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
        step_size = lr / _one_minus_exp(step * log_beta1)
        scale = 1.0 / tl.sqrt(_one_minus_exp(step * log_beta2))
        p = p - step_size * (m / (tl.sqrt(v) * scale + eps))
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


@triton.jit
def _step_kernel(
    # For each tensor: the addresses of p, g, m, v, the scales of m and of v, the master weight and the step's number,
    # the key of its random numbers, N, the first span and the number of spans.
    rows_ptr,  # [tensors, 12] int64
    tensor_of_span_ptr,  # [spans] int32: the index of the tensor of each span
    lr_ptr,  # [], or None if the number `lr` is used
    factor_ptr,  # [] fp32: the factor of the gradients, or None
    # correction1 is 1 / (1 - beta1^t), and correction2 is 1 / sqrt(1 - beta2^t), for codes, unless t is in memory.
    # complement1 is 1 - beta1, and complement2 is 1 - beta2.
    step, correction1, correction2, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,  # the dtypes of p, g, m and v
    MASTER: tl.constexpr,  # "", "fp32" or "bf16+8"
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,  # see `_LaunchKind.is_aligned`
    STEPS: tl.constexpr,  # True if the numbers of the steps are in memory; otherwise all are `step`
    MAXIMIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor, which the program finds in the table."""
    COLUMNS: tl.constexpr = COLUMNS_OF_A_ROW
    program = tl.program_id(0)
    row_ptr = rows_ptr + tl.load(tensor_of_span_ptr + program // SPAN) * 12
    start = (program - tl.load(row_ptr + 10) * SPAN) * BLOCK  # int64
    remaining = tl.load(row_ptr + 9) - start
    SPLITS: tl.constexpr = tl.int8 != M and MASTER == "" and not STOCHASTIC
    if ALIGNED and not SPLITS:
        # Then the mask has one value for 16 elements, and accesses are wide.
        remaining = tl.multiple_of(remaining, 16)
    if remaining > 0:
        if STEPS:
            step = tl.load(tl.load(row_ptr + 7).to(tl.pointer_type(tl.float32)))
        if lr_ptr is not None:
            lr = tl.load(lr_ptr).to(tl.float32)
        # A full block without a mask has accesses of 16 bytes for every N. With codes, two copies of the code would
        # need 72 registers instead of 56.
        is_full = remaining >= BLOCK if SPLITS else False
        if is_full:
            _update(
                row_ptr, start, None, None, factor_ptr, step, correction1, correction2, lr, beta1, beta2,
                complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
                P, G, M, V, MASTER, STOCHASTIC, ALIGNED, STEPS, MAXIMIZE, BLOCK,
            )  # fmt: skip
        else:
            first = tl.arange(0, BLOCK // COLUMNS)[:, None] * COLUMNS
            _update(
                row_ptr, start, first + tl.arange(0, COLUMNS)[None, :] < remaining, first < remaining, factor_ptr,
                step, correction1, correction2, lr, beta1, beta2,
                complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
                P, G, M, V, MASTER, STOCHASTIC, ALIGNED, STEPS, MAXIMIZE, BLOCK,
            )  # fmt: skip


class _LaunchKind(NamedTuple):
    """The properties that all tensors of one launch share."""

    # The index of the device, or -1 for the CPU.
    device_index: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    master_dtype: torch.dtype | None  # None without a master weight
    # True if all addresses are multiples of 16 bytes and, with compact states, all N are multiples of 16.
    is_aligned: bool
    step: float | None  # The number of the step, or None if it is in memory.


def adamw_step(
    parameters: Iterable[AdamWTensors], options: AdamWOptions, *, tables: dict[int, TensorTable] | None = None
) -> None:
    """Update contiguous tensors in place: one launch for all parameters that agree in dtypes, device, alignment and, if
    the step is a number, in the step. The device reads a step that is an fp32 tensor on it; the host reads any other.
    Only the device reads tensors in `options`. The call updates the `tables` of the previous call; nothing is copied to
    the device while the addresses are the same."""
    tables = {} if tables is None else tables
    # The tensors of each launch, by the fields of its `_LaunchKind`, and the first parameter of each launch.
    launches: dict[tuple, list[tuple[int, ...]]] = {}
    firsts: dict[tuple, Tensor] = {}
    # Small models wait for the host, so this loop builds plain tuples.
    for p, g, m, v, m_scale, v_scale, master, key, step in parameters:
        n = p.numel()
        # A rank may have no part of a parameter.
        if not n:
            continue
        device_index, number, step_address = p.get_device(), None, 0
        if isinstance(step, Tensor) and step.get_device() == device_index and step.dtype == torch.float32:
            step_address = step.data_ptr()
        else:
            number = float(step)
        p_address, g_address, m_address, v_address = p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()
        m_scale_address = v_scale_address = master_address = 0
        bits, master_dtype = p_address | g_address | m_address | v_address, None
        if m_scale is not None and v_scale is not None:
            m_scale_address, v_scale_address = m_scale.data_ptr(), v_scale.data_ptr()
            bits |= m_scale_address | v_scale_address | n
        if master is not None:
            master_address, master_dtype = master.data_ptr(), master.dtype
            bits |= master_address | n
        if options.is_stochastic:
            bits |= n
        kind = device_index, p.dtype, g.dtype, m.dtype, v.dtype, master_dtype, bits & 15 == 0, number
        addresses = (
            p_address, g_address, m_address, v_address, m_scale_address, v_scale_address, master_address,
            step_address, key, n,
        )  # fmt: skip
        launches.setdefault(kind, []).append(addresses)
        firsts.setdefault(kind, p)
    for position, (fields, tensors) in enumerate(launches.items()):
        kind, first = _LaunchKind(*fields), firsts[fields]
        block = block_size(max(dtype.itemsize for dtype in kind[1:6] if dtype is not None))
        table = tables[position] = update_table(tables.get(position), tensors, first.device, block * SPAN)
        _launch(first, table, options, kind, block)


@on_device
def _launch(first: Tensor, table: TensorTable, options: AdamWOptions, kind: _LaunchKind, block: int) -> None:
    """Update the tensors of one launch. `first` is on its device."""
    lr, factor = options.lr, options.factor
    lr_ptr = lr.to(first.device, non_blocking=True) if isinstance(lr, Tensor) else None
    beta1, beta2 = options.betas
    step = kind.step or 1.0
    launch(
        _step_kernel, table.tensor_of_span.numel() * SPAN,
        *in_order(_step_kernel)(
            rows_ptr=table.rows, tensor_of_span_ptr=table.tensor_of_span, lr_ptr=lr_ptr,
            factor_ptr=None if factor is None else factor.to(first.device, non_blocking=True),
            step=step, correction1=1.0 / (1.0 - beta1**step), correction2=1.0 / math.sqrt(1.0 - beta2**step),
            lr=0.0 if isinstance(lr, Tensor) else float(lr), beta1=float(beta1), beta2=float(beta2),
            complement1=1.0 - beta1, complement2=1.0 - beta2, log_beta1=_log(beta1), log_beta2=_log(beta2),
            weight_decay=float(options.weight_decay), eps=float(options.eps),
        ),
        P=TYPES[kind.param_dtype], G=TYPES[kind.grad_dtype],
        M=TYPES[kind.exp_avg_dtype], V=TYPES[kind.exp_avg_sq_dtype],
        MASTER={None: "", torch.float32: "fp32", torch.int8: "bf16+8"}[kind.master_dtype],
        STOCHASTIC=options.is_stochastic and kind.param_dtype == torch.bfloat16 and kind.master_dtype is None,
        ALIGNED=kind.is_aligned, STEPS=kind.step is None, MAXIMIZE=options.maximize,
        SPAN=SPAN, BLOCK=block, num_warps=NUM_WARPS,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
