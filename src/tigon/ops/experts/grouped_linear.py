r"""Products with the matrix of each row's group: y[s] = x[s] W[g(s)], rows sorted by group.

    dx[s] = dy[s] W[g(s)]^T,    dW[g] = sum over its rows x[s]^T dy[s]

torch's `grouped_mm` where it runs; elsewhere a loop over the groups, which on a GPU waits for their sizes. Rows beyond
the last group are not computed: whatever is in them, there and in dx, means nothing.

A bias of each group is added to its rows; its gradient is their sum, in fp32 and rounded once: a product with ones.

Shapes: S rows, E groups, N and M features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.runtime.autograd import first_order
from tigon.runtime.launch import launcher

__all__ = ["group_sums", "grouped_linear", "grouped_product", "grouped_weight_gradient", "rows_of_groups"]

GROUPED_MM = getattr(F, "grouped_mm", None)  # since torch 2.10


def _fast(x: Tensor, weight: Tensor) -> bool:
    """Whether `grouped_mm` takes the factors."""
    if GROUPED_MM is None or x.numel() == 0 or weight.numel() == 0:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    if torch.compiler.is_compiling():  # it has other types in eager code only, and addresses are not known
        return x.dtype == torch.bfloat16 and _aligned(x) and _aligned(weight)
    return _aligned(x) and _aligned(weight) and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0


def _aligned(x: Tensor) -> bool:
    """Whether the last two dimensions are stored by rows or by columns, each of which begins at 16 bytes."""
    rows, columns = x.shape[-2:]
    by_rows, by_columns = x.stride()[-2:]
    # `grouped_mm` refuses rows that share memory, as those of an expanded tensor do.
    if by_columns == 1 and by_rows >= columns:
        step = by_rows
    elif by_rows == 1 and by_columns >= rows:
        step = by_columns
    else:
        return False
    return step * x.element_size() % 16 == 0 and (x.dim() < 3 or x.stride(0) * x.element_size() % 16 == 0)


# --- products (no autograd) ------------------------------------------------------------------------


def _groups(ends: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """Group, first row and end of the groups that have rows; none on the meta device, which has no sizes to read."""
    ends = ends.tolist() if rows and not ends.is_meta else []
    return [(i, start, end) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if start < end]


@launcher(fake=lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [S, N], weight [E, N, M], ends [E] -> [S, M]."""
    if _fast(x, weight):
        return GROUPED_MM(x, weight, offs=ends)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for group, start, end in _groups(ends, x.shape[0]):
        torch.mm(x[start:end], weight[group], out=y[start:end])
    return y


@launcher(fake=lambda x, dy, ends: x.new_empty(ends.shape[0], x.shape[1], dy.shape[1]))
def grouped_weight_gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """x [S, N], dy [S, M], ends [E] -> [E, N, M]; of a group without rows, 0."""
    if _fast(x.mT, dy):
        return GROUPED_MM(x.mT, dy, offs=ends)
    dweight = x.new_zeros(ends.shape[0], x.shape[1], dy.shape[1])
    for group, start, end in _groups(ends, x.shape[0]):
        torch.mm(x[start:end].T, dy[start:end], out=dweight[group])
    return dweight


def group_sums(rows: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
    """rows [S, M], ends [E], factors [S] or None (of 1) -> [E, M], the sum over each group of its rows times these."""
    lanes = 16 // rows.element_size()  # the narrowest factor that `grouped_mm` takes
    if factors is None:
        factors = rows.new_ones(len(rows), lanes)
    else:
        factors = factors.to(rows.dtype)[:, None].repeat(1, lanes)
    return grouped_weight_gradient(factors, rows, ends)[:, 0].contiguous()


# --- autograd ------------------------------------------------------------------------------------


# Each product chooses its kernel by its own factors. A forward product that `grouped_mm` takes says nothing about the
# products of backward: their upstream gradient has another width, other strides and another address. Backward consists
# of the same two functions, so that it can be differentiated again.


def _save_factors(ctx, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """Save each factor of a product only if the gradient of the other one is needed."""
    needs_da, needs_db = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_db else None, b if needs_da else None, ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ends):
        _save_factors(ctx, x, weight, ends)
        return grouped_product(x, weight, ends)

    @staticmethod
    def backward(ctx, dy):
        x, weight, ends = ctx.saved_tensors
        dx = None if weight is None else _GroupedLinear.apply(dy, weight.mT, ends)
        return dx, None if x is None else _GroupedWeightGradient.apply(x, dy, ends), None


class _GroupedWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dy, ends):
        _save_factors(ctx, x, dy, ends)
        return grouped_weight_gradient(x, dy, ends)

    @staticmethod
    def backward(ctx, upstream):
        x, dy, ends = ctx.saved_tensors
        dx = None if dy is None else _GroupedLinear.apply(dy, upstream.mT, ends)
        return dx, None if x is None else _GroupedLinear.apply(x, upstream, ends), None


class _RowsOfGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, ends):
        ctx.save_for_backward(ends)
        return x[group]

    @staticmethod
    @first_order
    def backward(ctx, drows):
        return group_sums(drows.contiguous(), *ctx.saved_tensors), None, None


# --- public: their arguments are checked by the op that they are parts of --------------------------


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [S, N] and weight [E, N, M] of one dtype, ends [E] int32: one past each group's last row -> [S, M]."""
    return _GroupedLinear.apply(x, weight, ends)


def rows_of_groups(x: Tensor, group: Tensor, ends: Tensor) -> Tensor:
    """x [E, M], group [S] int64: of each row, whatever it is for rows of none, ends [E] -> x[group] [S, M]."""
    return _RowsOfGroups.apply(x, group, ends)
