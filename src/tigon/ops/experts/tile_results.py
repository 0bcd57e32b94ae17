"""Tiles of the grouped products of experts on Hopper: their sizes, and how their results are stored.

A tile has GROUPS x ROWS rows and COLUMNS columns. Each group of four warps holds the sums of ROWS rows in its
registers, and stores them in parts of 64 x 64. It writes a part to a buffer in shared memory, from which the tensor
memory accelerator (TMA) copies it to memory. If only some of the rows belong to the expert, the warps copy these rows
themselves.
"""

from typing import Any

from tigon.runtime.compat.triton import gl, gluon, hopper, tl

# The groups of warps, the rows of a group, the columns of a tile, and the features or rows that a step sums.
GROUPS, ROWS, COLUMNS, STEP = tl.constexpr(3), tl.constexpr(64), tl.constexpr(256), tl.constexpr(64)
BLOCK_ROWS = tl.constexpr(GROUPS.value * ROWS.value)
# The bytes of both factors of a step.
STEP_BYTES = tl.constexpr((BLOCK_ROWS.value + COLUMNS.value) * STEP.value * 2)

# Without Gluon this function does not exist.
store_results: Any = None

if gluon is not None and hopper is not None:

    @gluon.jit
    def _halves(x):
        """Return the left and the right half of x [64, C]."""
        return x.reshape([64, 2, x.shape[1] // 2]).permute(0, 2, 1).split()

    @gluon.jit
    def _store(y_ptr, y_tiles, buffers, y, tile_row, rows, col, columns, IS_WHOLE: gl.constexpr, BUFFER: gl.constexpr):
        """Store the first `rows` rows of y [64, 64] from column `col` on. If IS_WHOLE, the TMA stores all rows, as
        those of y_tiles from `tile_row` on. It reads them from one of two buffers, which take turns. Otherwise the
        warps store them, as the first rows of y_ptr."""
        buffer = buffers.index(BUFFER)
        if IS_WHOLE:
            # The TMA may still read the other buffer, which it got after this one.
            hopper.tma.store_wait(pendings=1)
            buffer.store(y)
            hopper.fence_async_shared()
            hopper.tma.async_copy_shared_to_global(y_tiles, [tile_row, col], buffer)
        else:
            # Eight neighbours write 128 bytes of a row.
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            buffer.store(y)
            row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
            column = col + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
            gl.store(y_ptr + (row * columns + column), buffer.load(layout), mask=(row < rows) & (column < columns))

    @gluon.jit
    def _store_256(
        y_ptr, y_tiles, buffers, y, tile_row, rows, col, columns, IS_WHOLE: gl.constexpr, BUFFER: gl.constexpr
    ):  # fmt: skip
        """Store the first `rows` rows of y [64, 256] with `BUFFER` and the buffer after it."""
        left, right = _halves(y)
        a, b = _halves(left)
        _store(y_ptr, y_tiles, buffers, a, tile_row, rows, col, columns, IS_WHOLE, BUFFER)
        _store(y_ptr, y_tiles, buffers, b, tile_row, rows, col + 64, columns, IS_WHOLE, BUFFER + 1)
        a, b = _halves(right)
        _store(y_ptr, y_tiles, buffers, a, tile_row, rows, col + 128, columns, IS_WHOLE, BUFFER)
        _store(y_ptr, y_tiles, buffers, b, tile_row, rows, col + 192, columns, IS_WHOLE, BUFFER + 1)

    @gluon.jit
    def store_results(
        y_ptr, y_tiles, buffers, y, tile_row, first_row, end_row, col, columns, BUFFER: gl.constexpr
    ):  # fmt: skip
        """Store those rows of y [64, 256] that belong to the expert."""
        if first_row + ROWS <= end_row:
            _store_256(y_ptr, y_tiles, buffers, y, tile_row, 64, col, columns, True, BUFFER)
        else:
            hopper.tma.store_wait(pendings=0)
            y_ptr += first_row.to(gl.int64) * columns
            _store_256(y_ptr, y_tiles, buffers, y, tile_row, end_row - first_row, col, columns, False, BUFFER)
