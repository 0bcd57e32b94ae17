r"""Quantisation of matrices to FP8, with scales that are computed from their values.

    tensorwise    s = amax(x) / largest                              q = round(x / s), x ~ s q
    rowwise       s_m = amax(x_m.) / largest for the copy by rows, s_k = amax(x_.k) / largest for the transposed copy

`largest` is 448. A matrix may consist of several parts, side by side or one below the other. Its
parts share scales as if the matrix existed, and are read where they are. It may also be act(gate) * up, which is never
stored in another format.

The passes, and their floors on an H200 (4.3 TB/s), for a bf16 matrix of N values:

    tensorwise, one copy             amax 2 N + 2 N read + N written        5 N bytes      0.039 ms for 8192 x 4096
    tensorwise, two copies           amax 2 N + 2 N read + 2 N written      6 N bytes      0.047 ms
    rowwise, the copy by rows        2 N read + N written                   3 N bytes      0.023 ms
    rowwise, the transposed copy     as tensorwise                          5 N bytes      0.039 ms
    rowwise, two copies              as tensorwise                          6 N bytes      0.047 ms

If another kernel that writes or reads the matrix has found the one maximum of a tensorwise scale, the amax pass and its
2 N bytes disappear. RMS norms attach it to their gradients (`tigon.runtime.maxima`), and the nodes of
`tigon.ops.adapters` pass it as an argument.
`quantise_gated` reads gate and up, so each of its reads counts twice. Parts of the second read come from the cache.

A matrix of zeros, or one whose values are all below 2^-100, has the scale of 2^-100. NaN makes the scale NaN, and an
infinity makes it infinite, so that the results of a product are NaN: errors are never hidden.

Shapes: M rows, K columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.fp8.formats import E4M3, LARGEST, MULTIPLE, SMALLEST_AMAX, Factor, pad, runs_fp8_kernels
from tigon.ops.fp8.quantisation_kernels import Fp8RowConfig, Fp8TileConfig, amax_kernel, row_kernel, write_kernel
from tigon.runtime.device import cdiv, device_of
from tigon.runtime.launch import launch, launcher
from tigon.runtime.maxima import Maxima, MaximaNeeds, find_maximum, zero_maxima


class Layout(NamedTuple):
    """The copies of a matrix that are needed, and how its scales are shared."""

    is_rowwise: bool
    needs_rows: bool
    needs_transposed: bool
    by_columns: bool = False  # True if parts are side by side, and False if they are one below the other.

    @property
    def maxima(self) -> MaximaNeeds:
        """Return the maxima of the matrix that its copies need."""
        if self.is_rowwise:
            return MaximaNeeds(False, self.needs_rows, self.needs_transposed)
        return MaximaNeeds(self.needs_rows or self.needs_transposed)


class Quantised(NamedTuple):
    """The FP8 copies of a matrix as factors of products. A copy that is not needed is None."""

    rows: Factor | None
    transposed: Factor | None

    def copy(self, by_rows: bool = True) -> Factor:
        """Return a copy that exists: the one by rows, or the transposed one."""
        copy = self.rows if by_rows else self.transposed
        assert copy is not None
        return copy

    def rows_of(self, start: int, stop: int) -> Factor:
        """Return the rows from `start` to `stop`, such as those of one weight, of the copy by rows."""
        rows = self.copy()
        return rows if start == 0 and stop == rows.values.shape[0] else rows.rows(start, stop)


class Copies(NamedTuple):
    """The tensors of the FP8 copies of a matrix [M, K]. A copy that is not needed is None."""

    rows: Tensor | None  # [M, K] fp8
    row_scale: Tensor | None  # [1] or [M, 1]
    transposed: Tensor | None  # [K, padded M] fp8, zero from column M on
    column_scale: Tensor | None  # [1] or [K, 1]

    def factors(self, layout: Layout) -> Quantised:
        """Return the copies that the layout needs. A compiled graph holds empty tensors in place of the others."""
        rows, row_scale, transposed, column_scale = self
        return Quantised(
            Factor(rows, row_scale) if layout.needs_rows else None,  # type: ignore[arg-type]
            Factor(transposed, column_scale) if layout.needs_transposed else None,  # type: ignore[arg-type]
        )


def _quantise_values(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return the FP8 values of x [M, K] in fp32, and the scale of the tensor, or of the rows with dim=1."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    amax = amax.clamp(min=SMALLEST_AMAX)
    # torch would replace the division of a number or by a number by a product with a rounded inverse.
    largest = torch.full_like(amax, LARGEST)
    return (x * (largest / amax)).to(E4M3), (amax / largest).view(1 if dim is None else (-1, 1))


def quantise_reference(x: Tensor, layout: Layout) -> Copies:
    """Quantise a matrix [M, K] in torch, for tests and for devices without Triton or FP8 units."""
    x = x.detach().float()
    dim = 1 if layout.is_rowwise else None
    rows, row_scale = _quantise_values(x, dim) if layout.needs_rows else (None, None)
    transposed, column_scale = None, None
    if layout.needs_transposed:
        values, column_scale = _quantise_values(x.t(), dim)
        # Padding works on bytes, because not every version of torch pads FP8 values. The byte of zero is zero.
        padding = (0, pad(x.shape[0]) - x.shape[0])
        transposed = F.pad(values.contiguous().view(torch.uint8), padding).view(E4M3)
    return Copies(rows, row_scale, transposed, column_scale)


def activate(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return act(gate) * up in fp32 (or fp64), in torch."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    if kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def _sizes(parts: Sequence[Tensor], by_columns: bool) -> tuple[int, int]:
    if by_columns:
        return parts[0].shape[0], sum(part.shape[1] for part in parts)
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def empty_copies(like: Tensor, m: int, k: int, layout: Layout) -> Copies:
    """Allocate the copies of a matrix [M, K]."""
    scale_of = lambda size: like.new_empty((size, 1) if layout.is_rowwise else 1, dtype=torch.float32)
    return Copies(
        like.new_empty((m, k), dtype=E4M3) if layout.needs_rows else None,
        scale_of(m) if layout.needs_rows else None,
        like.new_empty((k, pad(m)), dtype=E4M3) if layout.needs_transposed else None,
        scale_of(k) if layout.needs_transposed else None,
    )


def _empty_parts(first: Tensor, others: list[Tensor], layout: Layout) -> Copies:
    return empty_copies(first, *_sizes([first, *others], layout.by_columns), layout)


def row_view(x: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous: x itself, or a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


class _MatrixPart(NamedTuple):
    """A part of a matrix, or act(x) * up if `kind` is not empty, and the place of its first element."""

    x: Tensor
    up: Tensor | None
    kind: str
    row: int
    column: int


def _is_one_pass(parts: Sequence[_MatrixPart], layout: Layout) -> bool:
    """Return whether each row has one part, its own scale and only one copy: a program then reads it once."""
    return layout.is_rowwise and not layout.needs_transposed and (len(parts) == 1 or not layout.by_columns)


def _write_rows(part: _MatrixPart, copies: Copies) -> None:
    """Write the copy by rows of a part whose rows have their own scales, in one pass."""
    assert copies.rows is not None
    assert copies.row_scale is not None
    m, k = part.x.shape
    config = Fp8RowConfig.choose((k,), device_of(part.x))
    rows, scale = (x[part.row : part.row + m] for x in (copies.rows, copies.row_scale))
    stride_up = 0 if part.up is None else part.up.stride(0)
    launch(
        row_kernel, m, part.x, part.up, rows, scale, part.x.stride(0), stride_up, rows.stride(0), k,
        KIND=part.kind, FITS=k <= config.block, BLOCK=config.block,
        num_warps=config.num_warps,
    )  # fmt: skip


def _section(x: Tensor | None, start: int, size: int) -> Tensor | None:
    return None if x is None else x[start : start + size]


def _window(values: Tensor | None, row: int, column: int, m: int, k: int) -> Tensor | None:
    """Return the m rows from `row` on and the k columns from `column` on. If they are the whole matrix, return it
    itself, because a view of two dimensions takes the host 3 us or more."""
    if values is None or values.shape == (m, k):
        return values
    return values[row : row + m, column : column + k]


def _choose_tiles(part: _MatrixPart, writes: bool) -> Fp8TileConfig:
    inputs = 1 if part.up is None else 2
    return Fp8TileConfig.choose((inputs, writes), device_of(part.x))


def _find_maxima(part: _MatrixPart, maxima: Maxima) -> None:
    m, k = part.x.shape
    config = _choose_tiles(part, False)
    column_blocks = cdiv(k, config.block_k)
    stride_up = 0 if part.up is None else part.up.stride(0)
    launch(
        amax_kernel, cdiv(m, config.block_m) * column_blocks, part.x, part.up, maxima.tensor,
        _section(maxima.rows, part.row, m), _section(maxima.columns, part.column, k),
        part.x.stride(0), stride_up, m, k, column_blocks,
        KIND=part.kind, BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def write_part(part: _MatrixPart, maxima: Maxima, copies: Copies, layout: Layout, is_reversed: bool = False) -> None:
    """Write the copies of a part, scaled by the maxima of the matrix. With `is_reversed`, start at the last tile, which
    the producer of the matrix wrote last."""
    m, k = part.x.shape
    config = _choose_tiles(part, True)
    column_blocks = cdiv(k, config.block_k)
    programs = cdiv(m, config.block_m) * column_blocks
    row, column = part.row, part.column
    rows, transposed = copies.rows, copies.transposed
    row_scale, column_scale = copies.row_scale, copies.column_scale
    row_amax, column_amax = maxima.tensor, maxima.tensor
    if layout.is_rowwise:
        row_amax, column_amax = _section(maxima.rows, row, m), _section(maxima.columns, column, k)
        row_scale, column_scale = _section(row_scale, row, m), _section(column_scale, column, k)
    # Only the last part has rows that the padding follows, because the other parts have a multiple of 16 rows.
    stride_up = 0 if part.up is None else part.up.stride(0)
    launch(
        write_kernel, programs, part.x, part.up, row_amax, column_amax,
        _window(copies.rows, row, column, m, k), row_scale,
        _window(copies.transposed, column, row, k, pad(m)), column_scale,
        part.x.stride(0), stride_up, 0 if rows is None else rows.stride(0),
        0 if transposed is None else transposed.stride(0), m, pad(m) // MULTIPLE, k, column_blocks,
        KIND=part.kind, TENSORWISE=not layout.is_rowwise, REVERSED=is_reversed, BLOCK_M=config.block_m,
        BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


@launcher(fake=_empty_parts)
def quantise_parts(
    first: Tensor, others: list[Tensor], up: Tensor | None, kind: str, layout: Layout, maximum: Tensor | None
) -> Copies:
    """Return the copies of the matrix that consists of `first` and `others`, or of act(first) * up without others. Rows
    of parts may have gaps, but not those of a gated matrix. `maximum` [1] holds the bits of the largest absolute value
    for a tensorwise scale, or None if it is not known."""
    copies = _empty_parts(first, others, layout)
    parts, row, column = [], 0, 0
    for x in (first, *others):
        parts.append(_MatrixPart(row_view(x), up, kind, row, column))
        row, column = (row, column + x.shape[1]) if layout.by_columns else (row + x.shape[0], column)
    if _is_one_pass(parts, layout):
        for part in parts:
            _write_rows(part, copies)
    elif maximum is not None:
        for part in reversed(parts):
            write_part(part, Maxima(maximum, None, None), copies, layout, is_reversed=True)
    else:
        maxima = zero_maxima(first, *_sizes([first, *others], layout.by_columns), layout.maxima)
        for part in reversed(parts):
            _find_maxima(part, maxima)
        for part in parts:
            write_part(part, maxima, copies, layout)
    return copies


def quantise(parts: Sequence[Tensor], layout: Layout, maximum: Tensor | None = None) -> Quantised:
    """Return the FP8 copies of the matrix that consists of the parts. `maximum` is that of `quantise_parts`. Parts that
    are one below the other have multiples of 16 rows, except the last one. Without rows the copies are empty, and so
    are their scales."""
    if not (layout.needs_rows or layout.needs_transposed):
        return Quantised(None, None)
    first, *others = parts
    if runs_fp8_kernels(first):
        return quantise_parts(first, others, None, "", layout, maximum).factors(layout)
    x = torch.cat([part.float() for part in parts], int(layout.by_columns)) if others else first
    return quantise_reference(x, layout).factors(layout)


def quantise_tensor(x: Tensor, layout: Layout) -> Quantised:
    """Return the FP8 copies of x [..., K] as a matrix [M, K]. Its maximum is not searched if its producer found it."""
    return quantise([x.reshape(-1, x.shape[-1])], layout, None if layout.is_rowwise else find_maximum(x))


def quantise_gated(gate: Tensor, up: Tensor, kind: str, layout: Layout) -> Quantised:
    """Return the FP8 copies of act(gate) * up, for gate and up [M, K] whose rows are contiguous."""
    if runs_fp8_kernels(gate):
        return quantise_parts(gate, [], up, kind, layout, None).factors(layout)
    return quantise_reference(activate(gate, up, kind), layout).factors(layout)
