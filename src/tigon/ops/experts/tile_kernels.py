r"""Kernels of the grouped products of experts on Hopper, in Gluon: tiles of 192 x 256 by three groups of warps.

    product            y[s] = x[s] W[e(s)]                  rows of one expert follow one another
    gated product      the same, and a = act(gate) * up, where y[s] = [gate | up]
    weight gradient    dW[e] = sum over the rows of e of x[s]^T dy[s]

Hopper multiplies tiles that lie in shared memory, and all multiprocessors read them from the L2 cache. A tile of
192 x 256 reads 22 % fewer bytes for each operation than one of 128 x 256, the largest that Triton offers. Its fp32 sums
take three quarters of all registers, so three groups of four warps share it: each one sums 64 x 256. Gluon lets each
group run its own code (`warp_specialize`).

The first group also starts the copies, by the tensor memory accelerator (TMA). Copies for STAGES steps are in flight.
`ready[i]` completes when the tiles of stage i have arrived, and `empty[i]` when all groups have multiplied them. The
copies of a program's next tile start before the results of its last one are stored. A group of which no row belongs to
the expert does not multiply, so the rows of an expert are rounded up to a multiple of 64.

Shapes: S rows, E experts, N and M features; a step sums STEP features, or STEP rows of the weight gradient.
"""

from typing import Any

from tigon.ops.mlps.glu import activation_and_slope
from tigon.runtime.triton_private import gl, gluon, hopper, tl, triton

__all__ = ["COLUMNS", "GROUPS", "ROWS", "STEP", "product_kernel", "row_blocks_kernel", "weight_gradient_kernel"]

# Without Gluon these kernels do not exist.
product_kernel: Any = None
weight_gradient_kernel: Any = None

# The groups of warps, the rows of a group, the columns of a tile, and the features of a step.
GROUPS, ROWS, COLUMNS, STEP = 3, 64, 256, 64


@triton.jit(do_not_specialize=["E"])
def row_blocks_kernel(ends_ptr, blocks_ptr, E, BLOCK_ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # [E], [B, 4]
    """List the blocks of BLOCK_ROWS rows of all experts. Program e writes those of expert e.

    blocks[0, 0] is their number. blocks[1 + i] is the expert of block i, its first row and the end of its rows, and its
    first block.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + index, index < E, 0)
    starts = tl.load(ends_ptr + index - 1, (index > 0) & (index < E), 0)
    counts = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS
    if expert == 0:
        tl.store(blocks_ptr, tl.sum(counts))
    first_row = tl.sum(tl.where(index == expert, starts, 0))
    end_row = tl.sum(tl.where(index == expert, ends, 0))
    count = tl.sum(tl.where(index == expert, counts, 0))
    first_block = tl.sum(tl.where(index < expert, counts, 0))
    for i in range(0, count):
        row = blocks_ptr + (1 + first_block + i) * 4
        tl.store(row, expert)
        tl.store(row + 1, first_row)
        tl.store(row + 2, end_row)
        tl.store(row + 3, first_block)


if gluon is not None and hopper is not None:

    @gluon.jit
    def _halves(x):
        """Return the left and the right half of x [64, C]."""
        return x.reshape([64, 2, x.shape[1] // 2]).permute(0, 2, 1).split()

    @gluon.jit
    def _store(y_ptr, y_tiles, buffers, y, tile_row, rows, col, columns, IS_WHOLE: gl.constexpr, BUFFER: gl.constexpr):
        """Store the first `rows` rows of y [64, 64] at column `col` of y_ptr, or of y_tiles and its row `tile_row`.

        If IS_WHOLE, all rows are stored, by the TMA. It reads them from one of two buffers, which take turns.
        """
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
    def _store_results(
        y_ptr, y_tiles, buffers, y, tile_row, first_row, end_row, col, columns, BUFFER: gl.constexpr
    ):  # fmt: skip
        """Store those rows of y [64, 256] that belong to the expert."""
        if first_row + 64 <= end_row:
            _store_256(y_ptr, y_tiles, buffers, y, tile_row, 64, col, columns, True, BUFFER)
        else:
            hopper.tma.store_wait(pendings=0)
            y_ptr += first_row.to(gl.int64) * columns
            _store_256(y_ptr, y_tiles, buffers, y, tile_row, end_row - first_row, col, columns, False, BUFFER)

    @gluon.jit
    def _gated(gate, up, KIND: gl.constexpr):
        """Return act(gate) * up, computed in fp32 from rounded values, as backward does."""
        act, _ = activation_and_slope(gate.to(gl.float32), KIND)
        return (act * up.to(gl.float32)).to(gate.dtype)

    @gluon.jit
    def _store_part(y_ptr, y_tiles, buffers, y, tile_row, rows, col, columns, BUFFER: gl.constexpr):
        """Store the first `rows` rows of y [64, 64] when the TMA has read both buffers."""
        hopper.tma.store_wait(pendings=0)
        if rows >= 64:
            _store(y_ptr, y_tiles, buffers, y, tile_row, rows, col, columns, True, BUFFER)
        else:
            _store(y_ptr, y_tiles, buffers, y, tile_row, rows, col, columns, False, BUFFER)

    @gluon.jit
    def _store_gated(
        h_ptr, a_ptr, h_tiles, a_tiles, buffers, h, first_row, end_row, col, inner,
        KIND: gl.constexpr, BUFFER: gl.constexpr,
    ):  # fmt: skip
        """Store those rows of h = [gate | up] [64, 128 + 128] and of a = act(gate) * up that belong to the expert.

        The choice between the two ways to store is made for each part. If it were made once, the compiler would compute
        all of `a` before it, for which there are not enough registers.
        """
        gate, up = _halves(h)
        left_gate, right_gate = _halves(gate)
        left_up, right_up = _halves(up)
        width, rows = 2 * inner, end_row - first_row
        a_ptr += first_row.to(gl.int64) * inner
        a = _gated(left_gate, left_up, KIND)
        _store_part(a_ptr, a_tiles, buffers, a, first_row, rows, col, inner, BUFFER)
        if h_ptr is not None:
            h_ptr += first_row.to(gl.int64) * width
            _store_part(h_ptr, h_tiles, buffers, left_gate, first_row, rows, col, width, BUFFER + 1)
            _store_part(h_ptr, h_tiles, buffers, left_up, first_row, rows, inner + col, width, BUFFER)
        a = _gated(right_gate, right_up, KIND)
        col += 64
        _store_part(a_ptr, a_tiles, buffers, a, first_row, rows, col, inner, BUFFER + 1)
        if h_ptr is not None:
            _store_part(h_ptr, h_tiles, buffers, right_gate, first_row, rows, col, width, BUFFER)
            _store_part(h_ptr, h_tiles, buffers, right_up, first_row, rows, inner + col, width, BUFFER + 1)

    @gluon.jit
    def _find_block(blocks_ptr, tile, columns):
        """Return the expert of a tile, its first row, the end of the expert's rows, and its column of tiles.

        The tiles of an expert follow one another, those of a column first: they share a tile of the weight.
        """
        row = blocks_ptr + (1 + tile // columns) * 4
        start, end_row, first_block = gl.load(row + 1), gl.load(row + 2), gl.load(row + 3)
        place, count = tile - first_block * columns, (end_row - start + 191) // 192
        return gl.load(row), start + place % count * 192, end_row, place // count

    # --- products ----------------------------------------------------------------------------------

    @gluon.jit
    def _copy_step(
        x_tiles, weight_tiles, x_smem, weight_smem, ready, empty, blocks_ptr, tiles, columns, N, M, inner, copies,
        GATED: gl.constexpr, BY_ROWS: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Start the copies of one step. `copies` is (steps, tile, feature, expert, first row, column) of the next one.

        Return that of the step after it.
        """
        step, tile, k, expert, first_row, column = copies
        if tile < tiles:
            stage = step % STAGES
            hopper.mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar, weight = ready.index(stage), weight_smem.index(stage)
            hopper.mbarrier.expect(bar, (192 + 256) * 64 * 2)
            for group in gl.static_range(3):
                x = x_smem.index(stage * 3 + group)
                hopper.tma.async_copy_global_to_shared(x_tiles, [first_row + group * 64, k], bar, x)
            if GATED:
                row = expert * M + column * 128
                hopper.tma.async_copy_global_to_shared(weight_tiles, [row, k], bar, weight.slice(0, 128))
                hopper.tma.async_copy_global_to_shared(weight_tiles, [row + inner, k], bar, weight.slice(128, 128))
            elif BY_ROWS:
                hopper.tma.async_copy_global_to_shared(weight_tiles, [expert * N + k, column * 256], bar, weight)
            else:
                hopper.tma.async_copy_global_to_shared(weight_tiles, [expert * M + column * 256, k], bar, weight)
            step += 1
            k += 64
            if k >= N:
                k = 0
                tile += gl.num_programs(0)
                if tile < tiles:
                    expert, first_row, _, column = _find_block(blocks_ptr, tile, columns)
        return step, tile, k, expert, first_row, column

    @gluon.jit
    def _product_group(
        x_tiles, weight_tiles, y_tiles, a_tiles, y_ptr, a_ptr, x_smem, weight_smem, buffers, ready, empty, blocks_ptr,
        columns, N, M, inner, KIND: gl.constexpr, BY_ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        """Compute 64 rows of each tile of a program. The first group starts the copies of all groups."""
        GATED: gl.constexpr = KIND is not None
        layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]
        )
        tiles = gl.load(blocks_ptr) * columns
        step = 0
        first_tile = gl.program_id(0)
        copies = (0, first_tile, 0, 0, 0, 0)
        if GROUP == 0:
            if first_tile < tiles:
                expert, first_row, _, column = _find_block(blocks_ptr, first_tile, columns)
                copies = (0, first_tile, 0, expert, first_row, column)
            for _ in range(STAGES):
                copies = _copy_step(
                    x_tiles, weight_tiles, x_smem, weight_smem, ready, empty, blocks_ptr, tiles, columns, N, M, inner,
                    copies, GATED, BY_ROWS, STAGES,
                )  # fmt: skip
        for tile in range(first_tile, tiles, gl.num_programs(0)):
            _, block_row, end_row, column = _find_block(blocks_ptr, tile, columns)
            first_row = block_row + GROUP * 64
            # A block has at least one row, so the first group always has some.
            if first_row < end_row:
                total = gl.zeros([64, 256], gl.float32, layout)
                for k in range(0, N, 64):
                    stage = step % STAGES
                    hopper.mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    weight = weight_smem.index(stage)
                    total = hopper.warpgroup_mma(
                        x_smem.index(stage * 3 + GROUP), weight if BY_ROWS else weight.permute((1, 0)), total,
                        use_acc=k > 0, is_async=True,
                    )  # fmt: skip
                    # The product of the step before has ended, so other tiles may overwrite its factors.
                    total = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(total,))
                    if k > 0:
                        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                        if GROUP == 0:
                            copies = _copy_step(
                                x_tiles, weight_tiles, x_smem, weight_smem, ready, empty, blocks_ptr, tiles, columns,
                                N, M, inner, copies, GATED, BY_ROWS, STAGES,
                            )  # fmt: skip
                    step += 1
                total = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(total,))
                hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                if GROUP == 0:
                    copies = _copy_step(
                        x_tiles, weight_tiles, x_smem, weight_smem, ready, empty, blocks_ptr, tiles, columns, N, M,
                        inner, copies, GATED, BY_ROWS, STAGES,
                    )  # fmt: skip
                y = total.to(x_tiles.dtype)
                if GATED:
                    _store_gated(
                        y_ptr, a_ptr, y_tiles, a_tiles, buffers, y, first_row, end_row, column * 128, inner, KIND,
                        2 * GROUP,
                    )  # fmt: skip
                else:
                    _store_results(
                        y_ptr, y_tiles, buffers, y, first_row, first_row, end_row, column * 256, M, 2 * GROUP
                    )  # fmt: skip
            else:
                for _ in range(0, N, 64):
                    stage = step % STAGES
                    hopper.mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    hopper.mbarrier.arrive(empty.index(stage))
                    step += 1
        hopper.tma.store_wait(pendings=0)

    @gluon.jit(do_not_specialize=["columns"])
    def product_kernel(
        # [B, 4], [S, M] or None, [S, I] if KIND, and descriptors of [S, N], of [E M, N] or [E N, M], of y and of a
        blocks_ptr, y_ptr, a_ptr, x_tiles, weight_tiles, y_tiles, a_tiles, columns, N, M, inner,
        KIND: gl.constexpr, BY_ROWS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        """Compute tiles of y. All rows of a tile belong to one expert. Program i of P computes the tiles i, i + P, ...

        If BY_ROWS, the weight of an expert is stored as [N, M], otherwise as [M, N]. If KIND is an activation, M is
        2 I, a tile holds 128 columns of gate and the same 128 columns of up, and `a` is computed too.
        """
        dtype: gl.constexpr = x_tiles.dtype
        shape: gl.constexpr = [STAGES, 64, 256] if BY_ROWS else [STAGES, 256, 64]
        x_smem = gl.allocate_shared_memory(dtype, [STAGES * 3, 64, 64], x_tiles.layout)
        weight_smem = gl.allocate_shared_memory(dtype, shape, weight_tiles.layout)
        buffers = gl.allocate_shared_memory(dtype, [2 * 3, 64, 64], x_tiles.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            hopper.mbarrier.init(ready.index(stage), count=1)
            hopper.mbarrier.init(empty.index(stage), count=3)
        hopper.fence_async_shared()
        gl.warp_specialize(
            [
                (_product_group, (x_tiles, weight_tiles, y_tiles, a_tiles, y_ptr, a_ptr, x_smem, weight_smem, buffers,
                                  ready, empty, blocks_ptr, columns, N, M, inner, KIND, BY_ROWS, STAGES, 0)),
                (_product_group, (x_tiles, weight_tiles, y_tiles, a_tiles, y_ptr, a_ptr, x_smem, weight_smem, buffers,
                                  ready, empty, blocks_ptr, columns, N, M, inner, KIND, BY_ROWS, STAGES, 1)),
                (_product_group, (x_tiles, weight_tiles, y_tiles, a_tiles, y_ptr, a_ptr, x_smem, weight_smem, buffers,
                                  ready, empty, blocks_ptr, columns, N, M, inner, KIND, BY_ROWS, STAGES, 2)),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip

    # --- gradients of weights ----------------------------------------------------------------------

    @gluon.jit
    def _find_expert(ends_ptr, tile, rows, columns, ROWS_FIRST: gl.constexpr):
        """Return the expert of a tile, its first row, the end of its rows, and the row and the column of the tile.

        An expert has `rows` x `columns` tiles. If ROWS_FIRST, those of a column follow one another.
        """
        expert = tile // (rows * columns)
        place = tile - expert * rows * columns
        if ROWS_FIRST:
            tile_row, tile_column = place % rows, place // rows
        else:
            tile_row, tile_column = place // columns, place % columns
        start = gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        return expert, start, gl.load(ends_ptr + expert), tile_row, tile_column

    @gluon.jit
    def _copy_rows(
        x_tiles, dy_tiles, x_smem, dy_smem, ready, empty, ends_ptr, tiles, rows, columns, copies,
        ROWS_FIRST: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Start the copies of one step. `copies` is (steps, tile, row, end row, tile row, tile column) of the next one.

        Return that of the step after it.
        """
        step, tile, row, end_row, tile_row, tile_column = copies
        # An expert without rows has no steps.
        while (tile < tiles) & (row >= end_row):
            tile += gl.num_programs(0)
            if tile < tiles:
                _, row, end_row, tile_row, tile_column = _find_expert(ends_ptr, tile, rows, columns, ROWS_FIRST)
        if tile < tiles:
            stage = step % STAGES
            hopper.mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            hopper.mbarrier.expect(bar, (192 + 256) * 64 * 2)
            for group in gl.static_range(3):
                feature = tile_row * 192 + group * 64
                hopper.tma.async_copy_global_to_shared(x_tiles, [row, feature], bar, x_smem.index(stage * 3 + group))
            hopper.tma.async_copy_global_to_shared(dy_tiles, [row, tile_column * 256], bar, dy_smem.index(stage))
            step += 1
            row += 64
        return step, tile, row, end_row, tile_row, tile_column

    @gluon.jit
    def _clear_rows(tile, count):
        """Set the rows from `count` on to 0 in a tile [64, 64] in shared memory."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
        values = tile.load(layout)
        tile.store(gl.where((rows < count)[:, None], values, 0.0).to(values.dtype))

    @gluon.jit
    def _gradient_group(
        x_tiles, dy_tiles, dweight_tiles, dweight_ptr, x_smem, dy_smem, buffers, ready, empty, cleared, ends_ptr,
        tiles, rows, columns, N, M, ROWS_FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        """Compute 64 rows of each tile of a program. The first group starts the copies of all groups."""
        layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]
        )
        step = 0
        clears = 0
        first_tile = gl.program_id(0)
        copies = (0, first_tile, 0, 0, 0, 0)
        if GROUP == 0:
            if first_tile < tiles:
                _, row, end_row, tile_row, tile_column = _find_expert(ends_ptr, first_tile, rows, columns, ROWS_FIRST)
                copies = (0, first_tile, row, end_row, tile_row, tile_column)
            for _ in range(STAGES):
                copies = _copy_rows(
                    x_tiles, dy_tiles, x_smem, dy_smem, ready, empty, ends_ptr, tiles, rows, columns,
                    copies, ROWS_FIRST, STAGES,
                )  # fmt: skip
        for tile in range(first_tile, tiles, gl.num_programs(0)):
            expert, start, end_row, tile_row, tile_column = _find_expert(ends_ptr, tile, rows, columns, ROWS_FIRST)
            first_feature = tile_row * 192 + GROUP * 64
            total = gl.zeros([64, 256], gl.float32, layout)
            for row in range(start, end_row, 64):
                stage = step % STAGES
                x, dy = x_smem.index(stage * 3 + GROUP), dy_smem.index(stage)
                hopper.mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                if row + 64 > end_row:
                    # The last rows of the tiles belong to the next expert, or to none. A group clears them in its own
                    # tile of x, and in a part of the tile of dy.
                    _clear_rows(x, end_row - row)
                    _clear_rows(dy.slice(GROUP * 64, 64, dim=1), end_row - row)
                    if GROUP == 0:
                        _clear_rows(dy.slice(192, 64, dim=1), end_row - row)
                    hopper.fence_async_shared()
                    hopper.mbarrier.arrive(cleared)
                    hopper.mbarrier.wait(cleared, clears & 1)
                    clears += 1
                total = hopper.warpgroup_mma(x.permute((1, 0)), dy, total, use_acc=row > start, is_async=True)
                # The product of the step before has ended, so other tiles may overwrite its factors.
                total = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(total,))
                if row > start:
                    hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                    if GROUP == 0:
                        copies = _copy_rows(
                            x_tiles, dy_tiles, x_smem, dy_smem, ready, empty, ends_ptr, tiles, rows, columns,
                    copies, ROWS_FIRST, STAGES,
                        )  # fmt: skip
                step += 1
            total = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            if start < end_row:
                hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                if GROUP == 0:
                    copies = _copy_rows(
                        x_tiles, dy_tiles, x_smem, dy_smem, ready, empty, ends_ptr, tiles, rows, columns,
                    copies, ROWS_FIRST, STAGES,
                    )  # fmt: skip
            dweight = total.to(dweight_ptr.dtype.element_ty)
            expert_ptr = dweight_ptr + expert.to(gl.int64) * N * M
            _store_results(
                expert_ptr, dweight_tiles, buffers, dweight, expert * N + first_feature, first_feature, N,
                tile_column * 256, M, 2 * GROUP,
            )  # fmt: skip
        hopper.tma.store_wait(pendings=0)

    @gluon.jit(do_not_specialize=["tiles", "rows", "columns"])
    def weight_gradient_kernel(
        # [E, N, M], [E], and descriptors of [S, N], of [S, M] and of [E N, M]
        dweight_ptr, ends_ptr, x_tiles, dy_tiles, dweight_tiles, tiles, rows, columns, N, M,
        ROWS_FIRST: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        """Compute tiles of dW, 192 features of x by 256 features of dy. Program i of P computes tiles i, i + P, ..."""
        dtype: gl.constexpr = x_tiles.dtype
        x_smem = gl.allocate_shared_memory(dtype, [STAGES * 3, 64, 64], x_tiles.layout)
        dy_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], dy_tiles.layout)
        buffers = gl.allocate_shared_memory(dtype, [2 * 3, 64, 64], x_tiles.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        cleared = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            hopper.mbarrier.init(ready.index(stage), count=1)
            hopper.mbarrier.init(empty.index(stage), count=3)
        hopper.mbarrier.init(cleared, count=3)
        hopper.fence_async_shared()
        gl.warp_specialize(
            [
                (_gradient_group, (x_tiles, dy_tiles, dweight_tiles, dweight_ptr, x_smem, dy_smem, buffers, ready,
                                   empty, cleared, ends_ptr, tiles, rows, columns, N, M, ROWS_FIRST, STAGES, 0)),
                (_gradient_group, (x_tiles, dy_tiles, dweight_tiles, dweight_ptr, x_smem, dy_smem, buffers, ready,
                                   empty, cleared, ends_ptr, tiles, rows, columns, N, M, ROWS_FIRST, STAGES, 1)),
                (_gradient_group, (x_tiles, dy_tiles, dweight_tiles, dweight_ptr, x_smem, dy_smem, buffers, ready,
                                   empty, cleared, ends_ptr, tiles, rows, columns, N, M, ROWS_FIRST, STAGES, 2)),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
