r"""Products of each row with the matrix of its group: y[s] = x[s] W[g(s)]. Rows are sorted by group.

    dx[s] = dy[s] W[g(s)]^T,    dW[g] = sum over its rows x[s]^T dy[s]

On Hopper the products run in kernels of Tigon (`tigon.ops.experts.tiled_products`), elsewhere in `grouped_mm` of torch
if it supports them. Otherwise they run in a loop over the groups, for which the host waits until the GPU has computed
the sizes of the groups. Rows beyond the last group are not computed, neither in y nor in dx: their values are
undefined. y and dx may be products in FP8; dW is one in the dtype of W.

The bias of a group is added to the rows of the group. Its gradient is the sum of the gradients of these rows. A product
with ones computes this sum in fp32 and rounds it once.

Shapes: S rows, E groups, N and M features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.experts.fp8_products import Fp8Source, find_copy, fp8_row_product, quantise_rows
from tigon.ops.experts.tiled_products import tiled_product, tiled_weight_gradient, tiles_gradient, tiles_product
from tigon.runtime.launch import launcher
from tigon.runtime.op import Node

# torch has this function since version 2.10.
GROUPED_MM: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None)


def _supports_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether `grouped_mm` supports the factors of a product."""
    if x.numel() == 0 or weight.numel() == 0:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    # In a graph `grouped_mm` supports only bf16, and addresses are unknown.
    if torch.compiler.is_compiling():
        return x.dtype == torch.bfloat16 and _is_aligned(x) and _is_aligned(weight)
    return _is_aligned(x) and _is_aligned(weight) and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0


def _is_aligned(x: Tensor) -> bool:
    """Return whether the last two dimensions are stored by rows or columns that start at multiples of 16 bytes."""
    rows, columns = x.shape[-2:]
    row_stride, column_stride = x.stride()[-2:]
    # `grouped_mm` refuses rows that share memory, like those of an expanded tensor.
    if column_stride == 1 and row_stride >= columns:
        step = row_stride
    elif row_stride == 1 and column_stride >= rows:
        step = column_stride
    else:
        return False
    return step * x.element_size() % 16 == 0 and (x.dim() < 3 or x.stride(0) * x.element_size() % 16 == 0)


def _groups(ends: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """Return the index, the first row and the end of each group that has rows; none on the meta device, where sizes
    cannot be read."""
    sizes = ends.tolist() if rows and not ends.is_meta else []
    return [(i, start, end) for i, (start, end) in enumerate(zip([0, *sizes], sizes, strict=False)) if start < end]


@launcher(fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[2]))
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [S, M] for x [S, N], weight [E, N, M] and the end of each group, ends [E]."""
    if tiles_product(x, weight):
        return tiled_product(x, weight, ends)
    if GROUPED_MM is not None and _supports_grouped_mm(x, weight):
        return GROUPED_MM(x, weight, offs=ends)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for group, start, end in _groups(ends, x.shape[0]):
        torch.mm(x[start:end], weight[group], out=y[start:end])
    return y


@launcher(fake=lambda x, dy, ends: x.new_empty(ends.shape[0], x.shape[1], dy.shape[1]))
def grouped_weight_gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Return [E, N, M] for x [S, N], dy [S, M] and ends [E]. It is 0 for a group without rows."""
    if tiles_gradient(x, dy) and ends.shape[0]:
        return tiled_weight_gradient(x, dy, ends)
    # CUDA refuses to launch `grouped_mm` for an empty list of groups.
    if GROUPED_MM is not None and ends.shape[0] and _supports_grouped_mm(x.mT, dy):
        return GROUPED_MM(x.mT, dy, offs=ends)
    dweight = x.new_zeros(ends.shape[0], x.shape[1], dy.shape[1])
    for group, start, end in _groups(ends, x.shape[0]):
        torch.mm(x[start:end].T, dy[start:end], out=dweight[group])
    return dweight


def group_sums(rows: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return [E, M], the sum over the rows [S, M] of each group. If `factors` [S] is not None, they scale the rows."""
    # The smallest width of a factor that `grouped_mm` supports.
    lanes = 16 // rows.element_size()
    if factors is None:
        factors = rows.new_ones(len(rows), lanes)
    else:
        factors = factors.to(rows.dtype)[:, None].repeat(1, lanes)
    return grouped_weight_gradient(factors, rows, ends)[:, 0].contiguous()


def row_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool, fp8: Fp8Source | None) -> Tensor:
    """Return `grouped_linear` without autograd."""
    if fp8 is None:
        return grouped_product(x, weight if transposed else weight.mT, ends)
    by_rows = not transposed
    return fp8_row_product(quantise_rows(x), weight, find_copy(fp8.cache, fp8.name, weight, by_rows), ends, by_rows)


class _GroupedLinear(Node):
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool, fp8: Fp8Source | None) -> Tensor:
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dweight else None, weight if needs_dx else None, ends)
        ctx.transposed, ctx.fp8 = transposed, fp8
        return row_product(x, weight, ends, transposed, fp8)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Each product chooses its kernel by its own factors: dy has another width, other strides and another address.
        x, weight, ends = ctx.saved_tensors
        dx = None if weight is None else row_product(dy, weight, ends, not ctx.transposed, ctx.fp8)
        if x is None:
            return (dx,)
        first, second = (x, dy) if ctx.transposed else (dy, x)
        return dx, grouped_weight_gradient(first, second, ends)


class _RowsOfGroups(Node):
    def forward(ctx: Any, x: Tensor, group: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return x[group]

    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor]:
        return (group_sums(drows.contiguous(), *ctx.saved_tensors),)


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = True, fp8: Fp8Source | None = None
) -> Tensor:
    """Return [S, M] for x [S, N] and weight [E, N, M], or [E, M, N] if it is not `transposed`, of one dtype. `ends` [E]
    int32 is one past the last row of each group. The product runs in FP8 if `fp8` is not None; N and M are then
    multiples of 16."""
    return _GroupedLinear.apply(x, weight, ends, transposed, fp8)


def rows_of_groups(x: Tensor, group: Tensor, ends: Tensor) -> Tensor:
    """Return x[group] [S, M] for x [E, M], the group of each row [S] int64, and ends [E]. A row that belongs to no
    group may have any valid group in `group`. It does not contribute to the gradient."""
    return _RowsOfGroups.apply(x, group, ends)
