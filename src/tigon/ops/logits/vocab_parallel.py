"""A loss whose vocabulary is sharded over ranks, like the output layer of a tensor-parallel model.

Rank p of P holds columns [start_p, start_p + V_p) of the logits, or the same rows of a head from which it computes
them, and all ranks have the same tokens. One all-gather exchanges a few numbers per token (those of
`partial_statistics`, and V), from which every rank computes the statistics of the whole vocabulary. Each rank then
computes its columns of d(logits). With a head, dW is local, and dx is summed over the ranks.

Shapes: M tokens, H hidden, V vocabulary. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.ops.logits.token.kernels import Options, Shard, Statistics, Wants
from tigon.ops.logits.token.shards import combined_statistics, partial_statistics
from tigon.runtime import checks
from tigon.runtime.compat.operators import process_group_of
from tigon.runtime.device import cdiv


def _rows_per_rank(vocabulary: int, ranks: int) -> int:
    """Return the rows of a rank. The last ranks hold the remaining rows, as in `torch.chunk` and in DTensors."""
    return cdiv(vocabulary, ranks)


def _shard_sizes(vocabulary: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank."""
    rows = _rows_per_rank(vocabulary, ranks)
    return [max(0, min(rows, vocabulary - p * rows)) for p in range(ranks)]


def largest_shard(shard: Shard) -> int:
    """Return the number of rows of the largest shard.

    All ranks derive the size of a chunk from it, because every chunk contains a collective.
    """
    if not shard.group_name:
        return shard.vocabulary
    return _rows_per_rank(shard.vocabulary, process_group_of(shard.group_name).size())


def _check_group(op: str, process_group: Any) -> None:
    # On a rank that is not a member, `new_group` returns an int.
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
        raise ValueError(f"{op}: process_group must contain this rank, {dist.get_rank()}")
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}"
        )


def shard_of(
    op: str, process_group: dist.ProcessGroup | None, rows: int, vocab_size: int | None, name: str = "linear_weight",
    unit: str = "rows",
) -> Shard:  # fmt: skip
    """Check the arguments that describe a sharded vocabulary, and return the shard of this rank.

    `rows` is the number of classes that this rank holds. They are rows of a head or columns of logits, as `unit` says.
    `name` is the name that the op has for the tensor that holds them.
    """
    if vocab_size is not None:
        checks.size(op, "vocab_size", vocab_size)
    if process_group is None:
        if vocab_size is not None:
            raise ValueError(f"{op}: vocab_size needs a process_group over which the vocabulary is sharded, got None")
        return Shard(0, rows)
    _check_group(op, process_group)
    if vocab_size is None:
        # Computing it from the rows of all ranks would take a collective, and a wait for it, in every call.
        raise ValueError(f"{op}: vocab_size must be the number of {unit} on all ranks of process_group, got None")
    ranks, rank = process_group.size(), dist.get_rank(process_group)
    start, expected = min(rank * _rows_per_rank(vocab_size, ranks), vocab_size), _shard_sizes(vocab_size, ranks)[rank]
    if rows != expected:
        raise ValueError(
            f"{op}: {name} must have {expected} {unit} on rank {rank} of {ranks} for a vocabulary of "
            f"{vocab_size}, got {rows}"
        )
    return Shard(start, vocab_size, process_group.group_name)


def local_parts(
    op: str, process_group: dist.ProcessGroup | None, input: Tensor, target: Tensor,
    names: tuple[str, str] = ("input", "target"), **head: Tensor | None,
) -> list[Any]:  # fmt: skip
    """Return the local tensors of arguments that may be DTensors: the input, the target, and the tensors of the head.

    `names` are the names that the op has for the input and the target.

    The head must be sharded by rows over `process_group`. The input and the target must be replicated.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def to_local(name: str, x: Tensor | None, is_head: bool) -> Tensor | None:
        if not isinstance(x, DTensor):
            return x
        if process_group is None:
            raise ValueError(
                f"{op}: {name} must not be a DTensor without a process_group, got {x.placements}: for tensor "
                "parallelism, pass the group whose ranks share the vocabulary and have the same tokens; for FSDP, call "
                "the loss in the forward of the module, where the weight is gathered"
            )
        _check_group(op, process_group)
        ranks = dist.get_process_group_ranks(process_group)
        for dimension, placement in enumerate(x.placements):
            is_dimension_of_group = dist.get_process_group_ranks(x.device_mesh.get_group(dimension)) == ranks
            is_right = placement.is_shard(0) if is_head and is_dimension_of_group else placement.is_replicate()
            # If another mesh dimension replicated the head, ranks with other tokens would compute different gradients.
            if is_right and (not is_head or is_dimension_of_group or x.device_mesh.size(dimension) == 1):
                continue
            rule = "sharded by rows over process_group, and over no other mesh dimension" if is_head else "replicated"
            raise ValueError(f"{op}: {name} must be {rule}, got {x.placements} on {x.device_mesh}")
        # dx is summed over the ranks here, so its gradient is the same on every rank.
        return x.to_local() if is_head else x.to_local(grad_placements=[Replicate()] * len(x.placements))

    return [
        to_local(names[0], input, False),
        to_local(names[1], target, False),
        *(to_local(name, x, True) for name, x in head.items()),
    ]


def parallel_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants, shard: Shard,
    extra_targets: Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Return the statistics of the whole vocabulary, from the logits [M, V_p] of this rank."""
    group = process_group_of(shard.group_name)
    ranks = group.size()
    partials = partial_statistics(logits, target, weight, options, shard, wants, extra_targets)
    partials = torch.cat((partials, partials.new_full((len(partials), 1), shard.vocabulary)), 1)
    gathered = partials.new_empty(ranks, *partials.shape)
    # torch 2.13 warns about the older name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.flatten(0, 1), partials, group=group)
    sizes = tuple(_shard_sizes(shard.vocabulary, ranks))
    result = combined_statistics(gathered[..., :-1], target, weight, scales, options, wants, sizes, extra_targets)
    # Ranks that were called with different values of vocab_size shard different vocabularies.
    is_different = (gathered[..., -1] != shard.vocabulary).any()
    log_probs = result.log_probs.masked_fill(is_different, torch.nan)
    return result._replace(loss=result.loss.masked_fill(is_different, torch.nan), log_probs=log_probs)


def sum_over_ranks(x: Tensor, shard: Shard) -> None:
    """Replace x by its sum over the ranks that share the vocabulary."""
    if shard.group_name:
        dist.all_reduce(x, group=process_group_of(shard.group_name))
