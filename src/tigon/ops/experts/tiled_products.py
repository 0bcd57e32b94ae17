"""Grouped products of experts on Hopper: where their kernels run, and how they are launched (no autograd).

The kernels are those of `tile_product` and `tile_gradient`.

On an H100, the six products of Qwen3-30B-A3B's experts take 3.41 ms with 8192 tokens in bf16, and 3.80 by `grouped_mm`
of torch. In all measured sizes the results have the same bits. Elsewhere `tigon.ops.experts.grouped_linear` calls
`grouped_mm`.

Shapes: S rows, E experts, N and M features, I intermediate features.
"""

import torch
from torch import Tensor

from tigon.ops.experts import tile_results
from tigon.ops.experts.tile_gradient import weight_gradient_kernel
from tigon.ops.experts.tile_product import product_kernel, row_blocks_kernel
from tigon.runtime.compat.triton import TileDescriptor, gl, hopper, triton
from tigon.runtime.device import PLAIN, Device, cdiv, device_of
from tigon.runtime.launch import in_order, launch

ROWS, COLUMNS, STEP = tile_results.ROWS.value, tile_results.COLUMNS.value, tile_results.STEP.value
BLOCK_ROWS = tile_results.BLOCK_ROWS.value
# One stage is multiplied while the others are filled. Each stage takes 56 KB of shared memory.
STAGES = 3
# The shared memory that a program needs: the stages, two buffers of results for each group, and 1 KB for the barriers.
SHARED_BYTES = STAGES * tile_results.STEP_BYTES.value + 2 * BLOCK_ROWS * STEP * 2 + 1024
# The dtypes that the kernels multiply, by the names that Gluon gives them.
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


# --- where the kernels run -------------------------------------------------------------------------


def _is_hopper(device: Device) -> bool:
    """Return whether the device multiplies tiles in shared memory by the instructions of Hopper."""
    return device.arch == "sm_90" and device.shared_memory >= SHARED_BYTES


def _is_tileable(x: Tensor) -> bool:
    """Return whether the TMA can copy tiles of x, one matrix or a stack of them, without gaps between rows."""
    columns = x.shape[-1]
    # `is_contiguous` ignores the strides of dimensions of size 1, which the TMA reads.
    return x.is_contiguous() and x.stride(-2) == columns and columns % 8 == 0 and x.data_ptr() % 16 == 0


def _runs_on(*tensors: Tensor) -> bool:
    """Return whether the kernels run on tensors of these types and on their device."""
    x = tensors[0]
    if hopper is None or x.is_meta or x.dtype not in DTYPES or torch.compiler.is_compiling():
        return False
    # A DTensor, for example, has no address.
    has_memory = all(type(t) in PLAIN and t.dtype == x.dtype and t.numel() > 0 for t in tensors)
    return has_memory and _is_hopper(device_of(x))


def tiles_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether `tiled_product` computes the product of x [S, N] and weight [E, N, M]."""
    if not _runs_on(x, weight) or not _is_tileable(x) or weight.shape[2] % 8:
        return False
    # A step of an expert stored as [N, M] must not reach into the rows of the next expert.
    return _is_tileable(weight.mT) or (_is_tileable(weight) and weight.shape[1] % STEP == 0)


def gates_in_product(x: Tensor, weight: Tensor, kind: str) -> bool:
    """Return whether `tiled_gated_product` computes the product with weight [E, N, 2 I] and the activation."""
    # A tile has as many columns of gate as of up.
    fits = kind == "silu" and weight.shape[2] % COLUMNS == 0
    return fits and _runs_on(x, weight) and _is_tileable(x) and _is_tileable(weight.mT)


def tiles_gradient(x: Tensor, dy: Tensor) -> bool:
    """Return whether `tiled_weight_gradient` computes the gradient from x [S, N] and dy [S, M]."""
    return _runs_on(x, dy) and _is_tileable(x) and _is_tileable(dy) and x.shape[1] >= ROWS


# --- launches --------------------------------------------------------------------------------------


def _tiles(x: Tensor, rows: int, columns: int, stored_rows: int | None = None) -> object:
    """Return the descriptor of tiles [rows, columns] of x, with the layout in shared memory that the products read.

    `stored_rows` is the number of rows of the whole tile, if one copy fills only `rows` of them.
    """
    dtype = getattr(gl, DTYPES[x.dtype])
    layout = gl.NVMMASharedLayout.get_default_for([stored_rows or rows, columns], dtype)
    return TileDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def _row_blocks(ends: Tensor, rows: int) -> Tensor:
    """Return the blocks of rows of all experts [B, 4]; see `row_blocks_kernel`."""
    experts = ends.shape[0]
    blocks = ends.new_empty(1 + experts + rows // BLOCK_ROWS, 4)
    launch(
        row_blocks_kernel, experts, ends, blocks, experts,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_E=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return blocks


def _launch_product(
    x: Tensor, weight: Tensor, ends: Tensor, y: Tensor | None, a: Tensor | None, kind: str | None
) -> None:
    """Launch the kernel of products, which writes y or the gated product."""
    experts, n, m = weight.shape
    by_rows = not _is_tileable(weight.mT)
    blocks = _row_blocks(ends, x.shape[0])
    inner = m // 2
    columns = cdiv(inner, COLUMNS // 2) if kind else cdiv(m, COLUMNS)
    if by_rows:
        weight_tiles = _tiles(weight.view(experts * n, m), STEP, COLUMNS)
    else:
        stored = weight.mT.view(experts * m, n)
        weight_tiles = _tiles(stored, COLUMNS // 2 if kind else COLUMNS, STEP, COLUMNS)
    most_tiles = (blocks.shape[0] - 1) * columns
    # The last block of an expert has fewer rows. With 132 programs, a multiple of 3, some programs would get only last
    # blocks if each expert has three blocks, and others none.
    launch(
        product_kernel, min(most_tiles, device_of(x).multiprocessors - 1),
        *in_order(product_kernel)(
            blocks_ptr=blocks, y_ptr=y, a_ptr=a, x_tiles=_tiles(x, ROWS, STEP), weight_tiles=weight_tiles,
            y_tiles=None if y is None else _tiles(y, ROWS, STEP), a_tiles=None if a is None else _tiles(a, ROWS, STEP),
            columns=columns, N=n, M=m, inner=inner,
        ),
        KIND=kind, BY_ROWS=by_rows, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


def tiled_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [S, M] for x [S, N], weight [E, N, M] and the end of each expert's rows, ends [E]."""
    y = x.new_empty(x.shape[0], weight.shape[2])
    _launch_product(x, weight, ends, y, None, None)
    return y


def tiled_gated_product(
    x: Tensor, weight: Tensor, ends: Tensor, kind: str, needs_h: bool
) -> tuple[Tensor | None, Tensor]:
    """Return h = [gate | up] [S, 2 I] if it is needed, and act(gate) * up [S, I], for weight [E, N, 2 I]."""
    rows, width = x.shape[0], weight.shape[2]
    h = x.new_empty(rows, width) if needs_h else None
    a = x.new_empty(rows, width // 2)
    _launch_product(x, weight, ends, h, a, kind)
    return h, a


def tiled_weight_gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Return [E, N, M] for x [S, N], dy [S, M] and ends [E]. It is 0 for an expert without rows."""
    (experts,), n, m = ends.shape, x.shape[1], dy.shape[1]
    dweight = x.new_empty(experts, n, m)
    rows, columns = cdiv(n, BLOCK_ROWS), cdiv(m, COLUMNS)
    tiles = experts * rows * columns
    launch(
        weight_gradient_kernel, min(tiles, device_of(x).multiprocessors),
        *in_order(weight_gradient_kernel)(
            dweight_ptr=dweight, ends_ptr=ends, x_tiles=_tiles(x, STEP, ROWS), dy_tiles=_tiles(dy, STEP, COLUMNS),
            dweight_tiles=_tiles(dweight.view(experts * n, m), ROWS, STEP), tiles=tiles, rows=rows, columns=columns,
            N=n, M=m,
        ),
        ROWS_FIRST=rows < columns, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return dweight
