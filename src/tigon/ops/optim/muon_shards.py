"""Orthogonalise matrices whose rows are sharded over ranks: each rank takes whole matrices, and all ranks are busy.

Of B matrices, each rank holds some rows of all. It sends its rows of matrix i to the rank that computes matrix i, and
receives the rows of its own matrices from all ranks (one all-to-all). After the orthogonalisation the rows go back in
the same way. Each rank computes B / ranks matrices, rounded up or down, and the ranks that compute one more differ
between batches. So each element crosses the network twice, in bf16.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.ops.optim.dtensors import is_dtensor
from tigon.ops.optim.orthogonalise import Coefficients, orthogonalise
from tigon.runtime.device import cdiv


class RowShard(NamedTuple):
    """The whole matrix that a rank holds some rows of."""

    rows: int
    process_group: Any


def shard_of(p: Any) -> RowShard | None:
    """Return the shard of a DTensor [rows, columns]; None if this rank has whole matrices. Any other sharding than
    FSDP2's raises a ValueError."""
    if not is_dtensor(p):
        return None
    dims = [i for i, placement in enumerate(p.placements) if not placement.is_replicate()]
    if not dims:
        return None
    # `_StridedShard`, a subclass of `Shard`, has another order of rows.
    placement = p.placements[dims[0]]
    if len(dims) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        raise ValueError(
            "Muon: a DTensor must be sharded along dimension 0 and over one dimension of its mesh, as by FSDP2, got "
            f"placements {tuple(p.placements)}"
        )
    # Experts [E, rows, columns] are sharded as whole matrices.
    return RowShard(p.shape[0], p.device_mesh.get_group(dims[0])) if p.ndim == 2 else None


def _all_to_all(out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int], process_group: Any) -> None:
    """Exchange parts of bf16 tensors of one dimension. Bytes are sent, because gloo does not know bf16."""
    dist.all_to_all_single(
        out.view(torch.uint8), x.view(torch.uint8), [2 * n for n in out_sizes], [2 * n for n in sizes], process_group
    )


def orthogonalise_shards(
    x: Tensor, shard: RowShard, first_owner: int, coefficients: Coefficients, eps: float
) -> Tensor:
    """Return this rank's rows of the polar factors, for its rows x [B, local rows, columns] (bf16, contiguous) of B
    matrices. All ranks of the group make this call with the same matrices in the same order. If B is no multiple of the
    ranks, those from `first_owner` on compute one matrix more."""
    group = shard.process_group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    batch, local_rows, columns = x.shape
    counts = [batch // ranks + ((r - first_owner) % ranks < batch % ranks) for r in range(ranks)]
    # FSDP2 gives each rank the rows that `torch.chunk` would give it.
    chunk = cdiv(shard.rows, ranks)
    rows = [max(0, min(chunk, shard.rows - r * chunk)) for r in range(ranks)]
    count = counts[rank]
    sizes = [n * local_rows * columns for n in counts]
    whole_sizes = [count * n * columns for n in rows]
    parts = x.new_empty(count * shard.rows * columns)
    _all_to_all(parts, x.view(-1), whole_sizes, sizes, group)
    if count:
        whole = torch.cat([y.view(count, n, columns) for y, n in zip(parts.split(whole_sizes), rows, strict=True)], 1)
        o, scales = orthogonalise(whole, None, coefficients, eps)
        if scales is not None:
            o.mul_(scales[:, None, None])
        parts = torch.cat([y.reshape(-1) for y in o.split(rows, 1)])
    result = torch.empty_like(x)
    _all_to_all(result.view(-1), parts, sizes, whole_sizes, group)
    return result
