r"""The kernel of the gradients of the experts' weights on Hopper, in Gluon.

    dW[e] = sum over the rows of e of x[s]^T dy[s]

It works like `tile_product`: three groups of four warps share a tile of 192 features of x by 256 features of dy, and
the first group starts the copies of all. A step sums STEP rows. The last step of an expert also copies rows of the next
expert, or rows that nobody has written. The groups set these rows to 0 in shared memory, each in its own tile of x and
in a part of the tile of dy, and wait for each other (`cleared`). If only one of the factors were 0, an infinity or NaN
in the other one would become NaN.

Shapes: S rows, E experts, N and M features.
"""

from typing import Any

from tigon.ops.experts.tile_results import BLOCK_ROWS, COLUMNS, GROUPS, ROWS, STEP, STEP_BYTES, store_results
from tigon.runtime.compat.triton import gl, gluon, hopper

# Without Gluon this kernel does not exist.
weight_gradient_kernel: Any = None

if gluon is not None and hopper is not None:

    @gluon.jit
    def _find_expert(ends_ptr, tile, rows, columns, ROWS_FIRST: gl.constexpr):
        """Return the expert of a tile, its first row, the end of its rows, and the row and the column of the tile. An
        expert has `rows` x `columns` tiles. If ROWS_FIRST, those of a column follow one another."""
        expert = tile // (rows * columns)
        place = tile - expert * rows * columns
        if ROWS_FIRST:
            tile_row, tile_column = place % rows, place // rows
        else:
            tile_row, tile_column = place // columns, place % columns
        start = gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        return expert, start, gl.load(ends_ptr + expert), tile_row, tile_column

    @gluon.jit
    def _copy_rows(pipeline, copies, ROWS_FIRST: gl.constexpr, STAGES: gl.constexpr):
        """Start the copies of one step, and return the description of the step after it. `pipeline` has the
        descriptors, the stages and the tiles. `copies` describes the step: (its number, tile, row, end row, tile row,
        tile column)."""
        x_tiles, dy_tiles, x_smem, dy_smem, ready, empty, ends_ptr, tiles, rows, columns = pipeline
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
            hopper.mbarrier.expect(bar, STEP_BYTES)
            for group in gl.static_range(GROUPS):
                feature = tile_row * BLOCK_ROWS + group * ROWS
                hopper.tma.async_copy_global_to_shared(
                    x_tiles, [row, feature], bar, x_smem.index(stage * GROUPS + group)
                )
            hopper.tma.async_copy_global_to_shared(dy_tiles, [row, tile_column * COLUMNS], bar, dy_smem.index(stage))
            step += 1
            row += STEP
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
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
        )
        step = 0
        clears = 0
        first_tile = gl.program_id(0)
        pipeline = x_tiles, dy_tiles, x_smem, dy_smem, ready, empty, ends_ptr, tiles, rows, columns
        copies = (0, first_tile, 0, 0, 0, 0)
        if GROUP == 0:
            if first_tile < tiles:
                _, row, end_row, tile_row, tile_column = _find_expert(ends_ptr, first_tile, rows, columns, ROWS_FIRST)
                copies = (0, first_tile, row, end_row, tile_row, tile_column)
            for _ in range(STAGES):
                copies = _copy_rows(pipeline, copies, ROWS_FIRST, STAGES)
        for tile in range(first_tile, tiles, gl.num_programs(0)):
            expert, start, end_row, tile_row, tile_column = _find_expert(ends_ptr, tile, rows, columns, ROWS_FIRST)
            first_feature = tile_row * BLOCK_ROWS + GROUP * ROWS
            total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
            for row in range(start, end_row, STEP):
                stage = step % STAGES
                x, dy = x_smem.index(stage * GROUPS + GROUP), dy_smem.index(stage)
                hopper.mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                if row + STEP > end_row:
                    # The last rows of the tiles belong to the next expert, or to none. A group clears them in its own
                    # tile of x, and in a part of the tile of dy.
                    _clear_rows(x, end_row - row)
                    _clear_rows(dy.slice(GROUP * ROWS, ROWS, dim=1), end_row - row)
                    if GROUP == 0:
                        _clear_rows(dy.slice(BLOCK_ROWS, COLUMNS - BLOCK_ROWS, dim=1), end_row - row)
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
                        copies = _copy_rows(pipeline, copies, ROWS_FIRST, STAGES)
                step += 1
            total = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            if start < end_row:
                hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                if GROUP == 0:
                    copies = _copy_rows(pipeline, copies, ROWS_FIRST, STAGES)
            dweight = total.to(dweight_ptr.dtype.element_ty)
            expert_ptr = dweight_ptr + expert.to(gl.int64) * N * M
            store_results(
                expert_ptr, dweight_tiles, buffers, dweight, expert * N + first_feature, first_feature, N,
                tile_column * COLUMNS, M, 2 * GROUP,
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
        x_smem = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, STEP], x_tiles.layout)
        dy_smem = gl.allocate_shared_memory(dtype, [STAGES, STEP, COLUMNS], dy_tiles.layout)
        buffers = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, STEP], x_tiles.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        cleared = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            hopper.mbarrier.init(ready.index(stage), count=1)
            hopper.mbarrier.init(empty.index(stage), count=GROUPS)
        hopper.mbarrier.init(cleared, count=GROUPS)
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
