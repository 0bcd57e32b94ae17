r"""The kernel of the grouped products of experts on Hopper, in Gluon: tiles of 192 x 256 by three groups of warps.

    y[s] = x[s] W[e(s)]                  rows of one expert follow one another

Hopper multiplies tiles that lie in shared memory, and all multiprocessors read them from the L2 cache. A tile of
192 x 256 reads 22 % fewer bytes for each operation than one of 128 x 256, the largest outside of Gluon. Its fp32 sums
take three quarters of all registers, so three groups of four warps share it: each one sums 64 x 256. Gluon lets each
group run its own code (`warp_specialize`).

The first group also starts the copies, by the tensor memory accelerator (TMA). Of STAGES stages, one is multiplied
while the others are filled. `ready[i]` completes when the tiles of stage i have arrived, and `empty[i]` when all
groups have multiplied them. The copies of a program's next tile start before the results of its current one are
stored. A group of which no row belongs to the expert does not multiply, so an expert costs the time of its rows
rounded up to a multiple of 64.

Shapes: S rows, E experts, N and M features. A step sums STEP features.
"""

from typing import Any

from tigon.ops.experts.tile_results import BLOCK_ROWS, COLUMNS, GROUPS, ROWS, STEP, STEP_BYTES, store_results
from tigon.runtime.compat.triton import gl, gluon, hopper, tl, triton

# Without Gluon this kernel does not exist.
product_kernel: Any = None


@triton.jit(do_not_specialize=["E"])
def row_blocks_kernel(ends_ptr, blocks_ptr, E, BLOCK_ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # [E], [B, 4]
    """List the blocks of BLOCK_ROWS rows of all experts. Program e writes those of expert e. blocks[0, 0] is their
    number, and B - 1 is the largest possible one. blocks[1 + i] is for block i: the expert, the expert's first row, the
    end of the expert's rows, and the expert's first block."""
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
    def _find_block(blocks_ptr, tile, columns):
        """Return the expert of a tile, its first row, the end of the expert's rows, and its column of tiles. The tiles
        of an expert follow one another, those of a column first: they share a tile of the weight."""
        row = blocks_ptr + (1 + tile // columns) * 4
        start, end_row, first_block = gl.load(row + 1), gl.load(row + 2), gl.load(row + 3)
        place, count = tile - first_block * columns, (end_row - start + BLOCK_ROWS - 1) // BLOCK_ROWS
        return gl.load(row), start + place % count * BLOCK_ROWS, end_row, place // count

    @gluon.jit
    def _copy_step(pipeline, copies, BY_ROWS: gl.constexpr, STAGES: gl.constexpr):
        """Start the copies of one step, and return the description of the step after it. `pipeline` has the
        descriptors, the stages and the list of tiles. `copies` describes the step: (its number, tile, feature, expert,
        first row, column)."""
        x_tiles, weight_tiles, x_smem, weight_smem, ready, empty, blocks_ptr, tiles, columns, N, M = pipeline
        step, tile, k, expert, first_row, column = copies
        if tile < tiles:
            stage = step % STAGES
            hopper.mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar, weight = ready.index(stage), weight_smem.index(stage)
            hopper.mbarrier.expect(bar, STEP_BYTES)
            for group in gl.static_range(GROUPS):
                x = x_smem.index(stage * GROUPS + group)
                hopper.tma.async_copy_global_to_shared(x_tiles, [first_row + group * ROWS, k], bar, x)
            if BY_ROWS:
                hopper.tma.async_copy_global_to_shared(weight_tiles, [expert * N + k, column * COLUMNS], bar, weight)
            else:
                hopper.tma.async_copy_global_to_shared(weight_tiles, [expert * M + column * COLUMNS, k], bar, weight)
            step += 1
            k += STEP
            if k >= N:
                k = 0
                tile += gl.num_programs(0)
                if tile < tiles:
                    expert, first_row, _, column = _find_block(blocks_ptr, tile, columns)
        return step, tile, k, expert, first_row, column

    @gluon.jit
    def _product_group(
        x_tiles, weight_tiles, y_tiles, y_ptr, x_smem, weight_smem, buffers, ready, empty, blocks_ptr, columns, N, M,
        BY_ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        """Compute 64 rows of each tile of a program. The first group starts the copies of all groups."""
        layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
        )
        tiles = gl.load(blocks_ptr) * columns
        step = 0
        first_tile = gl.program_id(0)
        pipeline = x_tiles, weight_tiles, x_smem, weight_smem, ready, empty, blocks_ptr, tiles, columns, N, M
        copies = (0, first_tile, 0, 0, 0, 0)
        if GROUP == 0:
            if first_tile < tiles:
                expert, first_row, _, column = _find_block(blocks_ptr, first_tile, columns)
                copies = (0, first_tile, 0, expert, first_row, column)
            for _ in range(STAGES):
                copies = _copy_step(pipeline, copies, BY_ROWS, STAGES)
        for tile in range(first_tile, tiles, gl.num_programs(0)):
            _, block_row, end_row, column = _find_block(blocks_ptr, tile, columns)
            first_row = block_row + GROUP * ROWS
            # A block has at least one row, so the first group always has some.
            if first_row < end_row:
                total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
                for k in range(0, N, STEP):
                    stage = step % STAGES
                    hopper.mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    weight = weight_smem.index(stage)
                    total = hopper.warpgroup_mma(
                        x_smem.index(stage * GROUPS + GROUP), weight if BY_ROWS else weight.permute((1, 0)), total,
                        use_acc=k > 0, is_async=True,
                    )  # fmt: skip
                    # The product of the step before has ended, so other tiles may overwrite its factors.
                    total = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(total,))
                    if k > 0:
                        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                        if GROUP == 0:
                            copies = _copy_step(pipeline, copies, BY_ROWS, STAGES)
                    step += 1
                total = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(total,))
                hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
                if GROUP == 0:
                    copies = _copy_step(pipeline, copies, BY_ROWS, STAGES)
                y = total.to(x_tiles.dtype)
                store_results(y_ptr, y_tiles, buffers, y, first_row, first_row, end_row, column * COLUMNS, M, 2 * GROUP)
            else:
                for _ in range(0, N, STEP):
                    stage = step % STAGES
                    hopper.mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    hopper.mbarrier.arrive(empty.index(stage))
                    step += 1
        hopper.tma.store_wait(pendings=0)

    @gluon.jit(do_not_specialize=["columns"])
    def product_kernel(
        # [B, 4], [S, M], and descriptors of [S, N], of [E M, N] or [E N, M], and of y
        blocks_ptr, y_ptr, x_tiles, weight_tiles, y_tiles, columns, N, M,
        BY_ROWS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        """Compute tiles of y. All rows of a tile belong to one expert. Program i of P computes the tiles i, i + P, ...
        If BY_ROWS, the weight of an expert is stored as [N, M], otherwise as [M, N]."""
        dtype: gl.constexpr = x_tiles.dtype
        shape: gl.constexpr = [STAGES, STEP, COLUMNS] if BY_ROWS else [STAGES, COLUMNS, STEP]
        x_smem = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, STEP], x_tiles.layout)
        weight_smem = gl.allocate_shared_memory(dtype, shape, weight_tiles.layout)
        buffers = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, STEP], x_tiles.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            hopper.mbarrier.init(ready.index(stage), count=1)
            hopper.mbarrier.init(empty.index(stage), count=GROUPS)
        hopper.fence_async_shared()
        gl.warp_specialize(
            [
                (_product_group, (x_tiles, weight_tiles, y_tiles, y_ptr, x_smem, weight_smem, buffers, ready, empty,
                                  blocks_ptr, columns, N, M, BY_ROWS, STAGES, 0)),
                (_product_group, (x_tiles, weight_tiles, y_tiles, y_ptr, x_smem, weight_smem, buffers, ready, empty,
                                  blocks_ptr, columns, N, M, BY_ROWS, STAGES, 1)),
                (_product_group, (x_tiles, weight_tiles, y_tiles, y_ptr, x_smem, weight_smem, buffers, ready, empty,
                                  blocks_ptr, columns, N, M, BY_ROWS, STAGES, 2)),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
