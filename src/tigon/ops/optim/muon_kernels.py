r"""The two passes over memory of a step of Muon: the momentum before the orthogonalisation, and the update after it.

    m <- m + (1 - mu) (g - m)
    u =  m + (1 - mu) (g - m)  with Nesterov's momentum, else m        (the m of the first line)
    p <- p - lr weight_decay p - lr ratio s o

u is written in bf16, and its squares are summed in the same pass. o is the orthogonalised u, and s a number for each
matrix. As in AdamW, the kernels compute in fp32 and round once: u is computed from m before m is rounded.

Shapes: p, g, m [rows, columns] without gaps, of B matrices of one shape; u and o [B, rows, columns] bf16; s [B] fp32.
In bf16, the first pass moves 8 bytes of each element (it reads g and m, and writes m and u), and the second one 6.
One launch finds all matrices through a table of their addresses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.optim.tensor_table import NUM_WARPS, TYPES, TensorTable, block_size, find_span, tensor_at, update_table
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.launch import in_order, launch


class Matrix(NamedTuple):
    """A parameter or a part of one, its gradient and its momentum, [rows, columns]."""

    param: Tensor
    grad: Tensor
    momentum: Tensor


def momentum_reference(matrix: Matrix, momentum: float, nesterov: bool) -> Tensor:
    """Update the momentum of a matrix in place, and return u in its dtype, as `torch.optim.Muon` does."""
    grad = matrix.grad.to(matrix.momentum.dtype)
    buffer = matrix.momentum.lerp_(grad, 1 - momentum)
    return grad.lerp(buffer, momentum) if nesterov else buffer


def update_reference(param: Tensor, o: Tensor, lr: Tensor | float, ratio: float, weight_decay: float) -> None:
    """Update a parameter in place, as `torch.optim.Muon` does."""
    param.mul_(1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        param.sub_(o.to(param.dtype) * (lr * ratio))
    else:
        param.add_(o, alpha=-lr * ratio)


# A program computes this many blocks. It has not been tuned.
SPAN = 4


@triton.jit
def _lerp(start, end, weight, complement):
    """Return start + weight (end - start), from the nearer end, as torch does. `complement` is 1 - weight."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * complement)


@triton.jit
def _momentum_kernel(
    # For each matrix: the addresses of g, m and p, N, the first span and the number of spans.
    rows_ptr,  # [B, 6] int64
    matrix_of_span_ptr,  # [spans] int32
    u_ptr,  # [B, N] bf16
    squares_ptr,  # [spans] fp32
    momentum, complement,
    G: tl.constexpr, M: tl.constexpr,  # the dtypes of g and m
    ALIGNED: tl.constexpr,  # True if all addresses are multiples of 16 bytes, and N of 16
    NESTEROV: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update m, and write u and the sum of its squares, for one span of one matrix."""
    matrix, row_ptr, start, n = find_span(rows_ptr, matrix_of_span_ptr, 6, SPAN * BLOCK, ALIGNED)
    grad_ptr, momentum_ptr = tensor_at(row_ptr, G, ALIGNED), tensor_at(row_ptr + 1, M, ALIGNED)
    out_ptr = u_ptr + matrix.to(tl.int64) * n
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPAN):
        index = start + i * BLOCK + tl.arange(0, BLOCK)
        mask = index < n
        g = tl.load(grad_ptr + index, mask=mask, other=0).to(tl.float32)
        m = tl.load(momentum_ptr + index, mask=mask, other=0).to(tl.float32)
        m = _lerp(m, g, complement, momentum)
        u = (_lerp(g, m, momentum, complement) if NESTEROV else m).to(tl.bfloat16)
        tl.store(momentum_ptr + index, m, mask=mask)
        tl.store(out_ptr + index, u, mask=mask)
        u = u.to(tl.float32)
        total += u * u
    tl.store(squares_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _update_kernel(
    rows_ptr, matrix_of_span_ptr,  # as above
    o_ptr,  # [B, N] bf16
    scale_ptr,  # [B] fp32 or None
    lr_ptr,  # [], or None if the number `lr` is used
    lr, ratio, weight_decay,
    P: tl.constexpr,  # the dtype of p
    ALIGNED: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one span of one matrix."""
    matrix, row_ptr, start, n = find_span(rows_ptr, matrix_of_span_ptr, 6, SPAN * BLOCK, ALIGNED)
    param_ptr = tensor_at(row_ptr + 2, P, ALIGNED)
    o_row_ptr = o_ptr + matrix.to(tl.int64) * n
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    step_size = lr * ratio
    if scale_ptr is not None:
        step_size = step_size * tl.load(scale_ptr + matrix)
    decay = lr * weight_decay
    for i in tl.static_range(SPAN):
        index = start + i * BLOCK + tl.arange(0, BLOCK)
        mask = index < n
        p = tl.load(param_ptr + index, mask=mask, other=0).to(tl.float32)
        o = tl.load(o_row_ptr + index, mask=mask, other=0).to(tl.float32)
        p = p - decay * p
        p = p - step_size * o
        tl.store(param_ptr + index, p, mask=mask)


def _are_aligned(matrices: Sequence[Matrix]) -> bool:
    """Return whether all addresses are multiples of 16 bytes, and the number of elements is a multiple of 16."""
    bits = matrices[0].param.numel()
    for param, grad, momentum in matrices:
        bits |= param.data_ptr() | grad.data_ptr() | momentum.data_ptr()
    return bits & 15 == 0


def _block(param: Tensor) -> int:
    return block_size(param.dtype.itemsize)


def table_of(matrices: Sequence[Matrix], previous: TensorTable | None) -> TensorTable:
    """Return the table of both launches for matrices of one shape. It is `previous` if nothing has changed."""
    addresses: list[tuple[int, ...]] = [
        (x.grad.data_ptr(), x.momentum.data_ptr(), x.param.data_ptr(), x.param.numel()) for x in matrices
    ]
    return update_table(previous, addresses, matrices[0].param.device, _block(matrices[0].param) * SPAN)


def compute_momentum(
    matrices: Sequence[Matrix], momentum: float, nesterov: bool, table: TensorTable
) -> tuple[Tensor, Tensor]:
    """Update m in place, and return u [B, rows, columns] and the sums of its squares [B], for matrices of one shape and
    dtype on the current device."""
    first, *_ = matrix = matrices[0]
    u = torch.empty(len(matrices), *first.shape, dtype=torch.bfloat16, device=first.device)
    spans = table.tensor_of_span.numel()
    squares = torch.empty(spans, dtype=torch.float32, device=first.device)
    launch(
        _momentum_kernel, spans,
        *in_order(_momentum_kernel)(
            rows_ptr=table.rows, matrix_of_span_ptr=table.tensor_of_span, u_ptr=u, squares_ptr=squares,
            momentum=float(momentum), complement=1.0 - momentum,
        ),
        G=TYPES[matrix.grad.dtype], M=TYPES[matrix.momentum.dtype], ALIGNED=_are_aligned(matrices), NESTEROV=nesterov,
        SPAN=SPAN, BLOCK=_block(first), num_warps=NUM_WARPS,
    )  # fmt: skip
    return u, squares.view(len(matrices), -1).sum(1)


def apply_update(
    matrices: Sequence[Matrix], o: Tensor, scales: Tensor | None, lr: Tensor | float, ratio: float, weight_decay: float,
    table: TensorTable,
) -> None:  # fmt: skip
    """Update p in place, from o [B, rows, columns] and s [B]. `lr` may be a tensor of one element on the device."""
    lr_ptr, lr_number = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    launch(
        _update_kernel, table.tensor_of_span.numel(),
        *in_order(_update_kernel)(
            rows_ptr=table.rows, matrix_of_span_ptr=table.tensor_of_span, o_ptr=o.contiguous(), scale_ptr=scales,
            lr_ptr=lr_ptr, lr=float(lr_number), ratio=float(ratio), weight_decay=float(weight_decay),
        ),
        P=TYPES[matrices[0].param.dtype], ALIGNED=_are_aligned(matrices),
        SPAN=SPAN, BLOCK=_block(matrices[0].param), num_warps=NUM_WARPS,
    )  # fmt: skip
