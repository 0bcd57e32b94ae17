r"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): one step, in place, in one pass over memory.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    p <- (1 - lr weight_decay) p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

t counts steps from 1. The kernel computes in fp32 and rounds each of p, m and v once: p is computed from m and v before
they are rounded. 1 - beta^t is -expm1(t log beta), because the difference from one would lose its digits in fp32 in the
first steps. For the same reason the host computes 1 - beta and log beta, in fp64.

Shapes: p, g, m, v of one parameter have N elements without gaps. A step reads p, g, m, v and writes p, m, v: 14 bytes
for each parameter in bf16. One launch updates all parameters. It finds them in a table of their addresses.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import in_order, launch, on_device
from tigon.runtime.tuning import LaunchConfig

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
    """Return p, m and v after step number `step`, in fp32, or in fp64 if p is in fp64. Tests compare with it."""
    wide_dtype = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(wide_dtype) for x in (param, grad, exp_avg, exp_avg_sq))
    g = -g if maximize else g
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = v.sqrt() / math.sqrt(1 - betas[1] ** step) + eps
    return p - lr * weight_decay * p - lr / (1 - betas[0] ** step) * m / denominator, m, v


# --- configuration -------------------------------------------------------------------------------


class AdamWProblem(NamedTuple):
    """The size that the launch parameters of a step depend on."""

    # Bytes of an element of the parameters.
    itemsize: int


@dataclass(frozen=True)
class AdamWConfig(LaunchConfig):
    """Launch parameters. A program updates `block` elements."""

    block: int
    num_warps: int
    # This many consecutive programs share an entry of the map from programs to tensors. With 8 programs the map of 8e9
    # parameters in bf16 takes 4 MB, and at most 7 programs of a tensor's last span do nothing.
    span: int

    @staticmethod
    def heuristic(problem: AdamWProblem, device: Device) -> "AdamWConfig":
        """Return a block with which each of 128 threads accesses 16 bytes of each tensor once."""
        return AdamWConfig(block=4 * 32 * 16 // problem.itemsize, num_warps=4, span=8)


# --- kernel --------------------------------------------------------------------------------------


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0 with all digits of fp32, by a series where the difference would lose digits."""
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series))
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * series))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _update(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, mask,
    step, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
    MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Update one block, given pointers to its elements and a mask of those inside the tensor, or None if all are.

    `complement1` is 1 - beta1, and `complement2` is 1 - beta2.
    """
    g = tl.load(grad_ptr, mask=mask).to(tl.float32)
    m = tl.load(exp_avg_ptr, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr, mask=mask).to(tl.float32)
    p = tl.load(param_ptr, mask=mask).to(tl.float32)
    step_size = lr / one_minus_exp(step * log_beta1)
    scale = 1.0 / tl.sqrt(one_minus_exp(step * log_beta2))
    decay = lr * weight_decay
    if MAXIMIZE:
        g = -g
    m = beta1 * m + complement1 * g
    v = beta2 * v + complement2 * (g * g)
    # p * (1 - decay) would round twice, and a decay is often as small as the last digit of fp32.
    p = p - decay * p
    p = p - step_size * (m / (tl.sqrt(v) * scale + eps))
    tl.store(param_ptr, p, mask=mask)
    tl.store(exp_avg_ptr, m, mask=mask)
    tl.store(exp_avg_sq_ptr, v, mask=mask)


@triton.jit
def tensor_at(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to the tensor whose address is stored at `address_ptr`."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The compiler cannot know the alignment of an address that is loaded. Without it there are no accesses of 16
        # bytes.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _step_kernel(
    # For each tensor: the addresses of p, g, m, v and of the step's number, N, the first span and the number of spans.
    rows_ptr,  # [tensors, 8] int64
    tensor_of_span_ptr,  # [spans] int32: the index of the tensor of each span
    lr_ptr,  # [], or None if the number `lr` is used
    step, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,  # the dtypes of p, g, m and v
    ALIGNED: tl.constexpr,  # True if all addresses are multiples of 16 bytes
    STEPS: tl.constexpr,  # True if the numbers of the steps are in memory; otherwise all are `step`
    MAXIMIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor, which the program finds in the table."""
    program = tl.program_id(0)
    row_ptr = rows_ptr + tl.load(tensor_of_span_ptr + program // SPAN) * 8
    start = (program - tl.load(row_ptr + 6) * SPAN) * BLOCK  # int64
    remaining = tl.load(row_ptr + 5) - start
    if remaining > 0:
        offsets = start + tl.arange(0, BLOCK)
        param_ptr = tensor_at(row_ptr, P, ALIGNED) + offsets
        grad_ptr = tensor_at(row_ptr + 1, G, ALIGNED) + offsets
        exp_avg_ptr = tensor_at(row_ptr + 2, M, ALIGNED) + offsets
        exp_avg_sq_ptr = tensor_at(row_ptr + 3, V, ALIGNED) + offsets
        if STEPS:
            step = tl.load(tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32)))
        if lr_ptr is not None:
            lr = tl.load(lr_ptr).to(tl.float32)
        # A full block needs no mask, so it has accesses of 16 bytes for every N.
        if remaining >= BLOCK:
            _update(
                param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, None,
                step, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE,
            )  # fmt: skip
        else:
            _update(
                param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, tl.arange(0, BLOCK) < remaining,
                step, lr, beta1, beta2, complement1, complement2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE,
            )  # fmt: skip


# --- launcher ------------------------------------------------------------------------------------


class LaunchKind(NamedTuple):
    """The properties that all tensors of one launch share."""

    # The index of the device, or -1 for the CPU.
    device_index: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    # True if all addresses are multiples of 16 bytes.
    is_aligned: bool
    # The number of the step, or None if it is in memory.
    step: float | None


class TableKey(NamedTuple):
    """Everything that a table depends on."""

    # For each tensor its addresses, and N in the last place.
    tensors: list[tuple[int, ...]]
    device: torch.device
    # Elements of a span of blocks.
    span_size: int
    stream: int


@dataclass(frozen=True)
class TensorTable:
    """The tensors of one launch, in the memory of their device."""

    key: TableKey
    # [tensors, columns] int64, as the kernel reads them: the addresses, N, the first span and the number of spans.
    rows: Tensor
    # [spans] int32: the index of the tensor of each span.
    tensor_of_span: Tensor


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor | float],
    lr: Tensor | float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    *,
    tables: dict[int, TensorTable] | None = None,
) -> None:
    """Update p, m and v of each parameter in place, for step number `steps[i]`.

    One launch updates all tensors that agree in dtypes, device, alignment and, if the step is a number, in the step.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: fp32 | bf16 | fp16, contiguous. Those of one parameter are on one device.
        steps: Numbers, or tensors of one element. The host does not read an fp32 tensor on the parameter's device.
        lr: A number, or a tensor of one element in any dtype, which only the device reads.
        tables: A dict in which the caller passes the tables of the previous call, and which this call updates. Nothing
            is copied to the device while the tensors have the same addresses.
    """
    tables = {} if tables is None else tables
    # The fields of a `LaunchKind`, and the tensors of that launch.
    launches: dict[tuple, list[tuple[int, ...]]] = {}
    for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        device_index, number, step_address = p.get_device(), None, 0
        if isinstance(step, Tensor) and step.get_device() == device_index and step.dtype == torch.float32:
            step_address = step.data_ptr()
        else:
            number = float(step)
        p_address, g_address, m_address, v_address = p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()
        is_aligned = (p_address | g_address | m_address | v_address) & 15 == 0
        kind = device_index, p.dtype, g.dtype, m.dtype, v.dtype, is_aligned, number
        # A plain tuple, because small models wait for the host: 300 NamedTuples would take 0.1 ms. The address of the
        # step's number is 0 if the launch has one number for all.
        addresses = p_address, g_address, m_address, v_address, step_address, p.numel()
        launches.setdefault(kind, []).append(addresses)
    for position, (fields, tensors) in enumerate(launches.items()):
        kind = LaunchKind(*fields)
        index = kind.device_index
        device = torch.device("cuda", index) if index >= 0 else params[0].device
        first = next(p for p in params if p.get_device() == index)
        config = AdamWConfig.choose(AdamWProblem(kind.param_dtype.itemsize), device_of(first))
        table = tables[position] = update_table(tables.get(position), tensors, device, config.block * config.span)
        device_lr = lr.to(device, non_blocking=True) if isinstance(lr, Tensor) else float(lr)
        _launch(table.rows, table.tensor_of_span, device_lr, betas, eps, weight_decay, maximize, kind, config)


def update_table(
    previous: TensorTable | None, tensors: list[tuple[int, ...]], device: torch.device, span_size: int
) -> TensorTable:
    """Return the table of these tensors for spans of `span_size` elements. It is `previous` if nothing has changed."""
    # A copy on another stream may not have ended, so the table depends on the stream.
    key = TableKey(tensors, device, span_size, current_raw_stream(device.index) if device.type == "cuda" else 0)
    if previous is not None and previous.key == key:
        return previous
    values, first_span = array("q"), 0
    lengths = [n for *_, n in tensors]
    for addresses, n in zip(tensors, lengths, strict=True):
        spans = cdiv(n, span_size)
        values.extend((*addresses, first_span, spans))
        first_span += spans
    host_rows = torch.frombuffer(values, dtype=torch.int64).view(len(tensors), -1)
    # The host memory is pinned, so that the copy does not wait for the device. Torch keeps this memory until the copy
    # has ended.
    rows = (host_rows.pin_memory() if device.type == "cuda" else host_rows).to(device, non_blocking=True)
    if previous is not None and previous.key[1:] == key[1:] and [n for *_, n in previous.key.tensors] == lengths:
        return TensorTable(key, rows, previous.tensor_of_span)
    return TensorTable(key, rows, torch.repeat_interleave(rows[:, -1].int(), output_size=first_span))


@on_device
def _launch(
    rows: Tensor,
    tensor_of_span: Tensor,
    lr: Tensor | float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    kind: LaunchKind,
    config: AdamWConfig,
) -> None:
    """Update the tensors of one launch."""
    lr_ptr, lr_number = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    beta1, beta2 = betas
    launch(
        _step_kernel, tensor_of_span.numel() * config.span,
        *in_order(_step_kernel)(
            rows_ptr=rows, tensor_of_span_ptr=tensor_of_span, lr_ptr=lr_ptr,
            step=kind.step or 0.0, lr=lr_number, beta1=float(beta1), beta2=float(beta2),
            complement1=1.0 - beta1, complement2=1.0 - beta2, log_beta1=log_of(beta1), log_beta2=log_of(beta2),
            weight_decay=float(weight_decay), eps=float(eps),
        ),
        P=TYPES[kind.param_dtype], G=TYPES[kind.grad_dtype],
        M=TYPES[kind.exp_avg_dtype], V=TYPES[kind.exp_avg_sq_dtype],
        ALIGNED=kind.is_aligned, STEPS=kind.step is None, MAXIMIZE=maximize,
        SPAN=config.span, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip


def log_of(beta: float) -> float:
    """Return log(beta), or -inf for 0."""
    return math.log(beta) if beta else -math.inf
