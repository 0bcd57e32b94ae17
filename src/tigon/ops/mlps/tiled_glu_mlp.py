"""A gated MLP in tiles of tokens, for so many tokens that gate and up of all of them would be the peak of a layer.

    forward     for each tile: gate, up, a, y.  Only x is saved.
    backward    for each tile: gate and up again, then da, dgate, dup, dx, and the tile's part of dG, dU and dD.

Backward computes the same eight products as that of `glu_mlp` in a checkpointed layer, or in `lean(mlp=True)`. The
tensors of width I exist for one tile at a time, in forward and in backward: three of them, and x, y, dy and dx remain.
Without tiles the MLP of Llama-3-8B needs 36 GiB for 450,000 tokens, and 4 GiB in ten tiles.

Each value of y and dx is a sum over features within one tile, as without tiles. dG, dU and dD are sums over tokens.
Their products are added in fp32 and rounded once, like one product over all tokens, but in another order. The three
fp32 sums take four bytes for each weight of the MLP while backward computes them, 0.66 GiB for Llama-3-8B. Each tile
reads and writes them once: 0.4 ms on an H200, where the eleven products of a tile of 45,056 tokens take 88 ms.

Shapes: T tokens, H hidden, I intermediate, O outputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tigon.ops.mlps.activation_kernels import GateOptions, glu_backward_into, glu_forward
from tigon.ops.mlps.gated_node import multiply_gates, save_gated, unpack_gated
from tigon.runtime.device import cdiv
from tigon.runtime.op import Node
from tigon.runtime.products import accumulates_in_fp32, multiply, product

# The number of rows of a tile is a multiple of this number, so that the products of all tiles but the last are aligned.
ALIGNMENT = 256
# If gate, up and the gradient of their product take more bytes than this number, and backward recomputes gate and up,
# the MLP is computed in tiles. A tile has 49,932 tokens of Llama-3-8B.
TILE_BYTES = 2**32


def tile_rows(x: Tensor, gate_weight: Tensor) -> int:
    """Return the number of tokens of a tile for x [..., H] and the weight [I, H]; 0 if one tile holds all tokens."""
    inner, hidden = gate_weight.shape
    rows, bytes_per_row = x.numel() // max(1, hidden), 3 * inner * x.element_size()
    tiles = cdiv(rows * bytes_per_row, TILE_BYTES)
    return 0 if tiles <= 1 else min(rows, cdiv(cdiv(rows, tiles), ALIGNMENT) * ALIGNMENT)


def _tiles(rows: int, tile: int) -> Iterator[slice]:
    for start in range(0, rows, tile):
        yield slice(start, min(start + tile, rows))


class _WeightSum:
    """The gradient [M, N] of a weight, a sum of products over tiles, in fp32 if the weight has half precision."""

    def __init__(self, weight: Tensor) -> None:
        self.dtype = weight.dtype
        self.has_product = False
        self.total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a b, for a [M, K] and b [K, N]."""
        if a.dtype != torch.float32 and not accumulates_in_fp32(a):
            a, b = a.float(), b.float()
        product(a, b, out=self.total, accumulate=self.has_product)
        self.has_product = True

    def finish(self) -> Tensor:
        """Return the sum in the dtype of the weight, and free the fp32 sum."""
        total = self.total.to(self.dtype)
        del self.total
        return total


class _TiledGLUMLP(Node):
    """Compute y from x in tiles of `tile` tokens. `activation` holds the kind of the gate, and its numbers."""

    def forward(
        ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        activation: tuple[str, GateOptions], tile: int, is_checkpointed: bool,
    ) -> Tensor:  # fmt: skip
        # The second run of a checkpointed layer ends here, before it computes any product.
        save_gated(ctx, x, False, is_checkpointed, x, gate_weight, up_weight, down_weight)
        ctx.activation, ctx.tile, ctx.shape = activation, tile, x.shape
        y, rows = x.new_empty(*x.shape[:-1], len(down_weight)), x.flatten(0, -2)
        y_rows = y.view(-1, len(down_weight))
        for part in _tiles(len(rows), tile):
            a = glu_forward(*multiply_gates(rows[part], gate_weight, up_weight), *activation)
            multiply(a, down_weight.t(), out=y_rows[part])
            # The next tile must not find the memory of this one in use.
            del a
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_weight, up_weight, down_weight = unpack_gated(ctx)
        needs_x, *needs = ctx.needs_input_grad[:4]
        activation: tuple[str, GateOptions] = ctx.activation
        x, dy = x.flatten(0, -2), dy.reshape(-1, dy.shape[-1])
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        weights = gate_weight, up_weight, down_weight
        dgate_weight, dup_weight, ddown_weight = sums = [
            _WeightSum(weight) if is_needed else None for weight, is_needed in zip(weights, needs, strict=True)
        ]
        for part in _tiles(len(x), ctx.tile):
            x_tile, dy_tile = x[part], dy[part]
            gate, up = multiply_gates(x_tile, gate_weight, up_weight)
            da = multiply(dy_tile, down_weight)
            # The kernel writes a, dgate and dup into the memory of da, gate and up.
            glu_backward_into(da, gate, up, *activation, gate, up, None if ddown_weight is None else da)
            if ddown_weight is not None:
                ddown_weight.add(dy_tile.t(), da)
            del da
            if dgate_weight is not None:
                dgate_weight.add(gate.t(), x_tile)
            if dup_weight is not None:
                dup_weight.add(up.t(), x_tile)
            if dx is not None:
                multiply(up, up_weight, total=multiply(gate, gate_weight, out=dx[part]))
            del gate, up
        gradients = [None if total is None else total.finish() for total in sums]
        return None if dx is None else dx.view(ctx.shape), *gradients


def tiled_glu_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: tuple[str, GateOptions],
    tile: int, is_checkpointed: bool,
) -> Tensor:  # fmt: skip
    """Return `glu_mlp` of checked arguments for which `supports_products` is True, in tiles of `tile` tokens."""
    return _TiledGLUMLP.apply(x, gate_weight, up_weight, down_weight, activation, tile, is_checkpointed)
