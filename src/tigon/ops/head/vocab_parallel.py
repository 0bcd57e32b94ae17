"""A loss whose vocabulary is cut over ranks, as the output layer of tensor-parallel models is.

Rank p of P holds rows [start_p, start_p + V_p) of the head and has the same tokens as the others. It computes its part
of the logits; seven numbers a token (`token_loss.partial_statistics`, and V) go round in one all-gather and give every
rank the statistics of the whole vocabulary, so each writes its part of d(logits). dW is local; dx is summed over ranks.

Shapes: M tokens, H hidden, V vocabulary. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.ops.logits.token.kernels import Options, Shard, Statistics, Wants, combined_statistics, partial_statistics
from tigon.runtime import checks
from tigon.runtime.device import cdiv
from tigon.runtime.torch_private import process_group_of

__all__ = ["Cut", "cut_of", "local_parts", "parallel_statistics", "sum_over_ranks"]


class Cut(NamedTuple):
    """How a vocabulary is cut; the empty name stands for one rank that has it all."""

    group_name: str
    start: int  # of this rank's rows
    vocabulary: int

    @property
    def most_rows(self) -> int:
        """Of the rank that has the most; all ranks cut the tokens by it, for they meet in every chunk."""
        return _length(self.vocabulary, _group(self.group_name).size()) if self.group_name else self.vocabulary

    @property
    def shard(self) -> Shard | None:
        return Shard(self.start, self.vocabulary) if self.group_name else None


def _length(vocabulary: int, ranks: int) -> int:
    """Rows of every rank but the last ones, which have what is left: as `torch.chunk` and DTensor cut."""
    return cdiv(vocabulary, ranks)


def _cut_sizes(vocabulary: int, ranks: int) -> list[int]:
    """Rows of each rank."""
    length = _length(vocabulary, ranks)
    return [max(0, min(length, vocabulary - p * length)) for p in range(ranks)]


def _check_group(op: str, process_group: object) -> None:
    # What `new_group` returns there is an int.
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
        raise ValueError(f"{op}: process_group must contain this rank, {dist.get_rank()}")
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}"
        )


def cut_of(op: str, process_group: dist.ProcessGroup | None, rows: int, vocab_size: int | None) -> Cut:
    """The cut of a head of which this rank holds `rows` rows."""
    if vocab_size is not None:
        checks.size(op, "vocab_size", vocab_size)
    if process_group is None:
        if vocab_size is not None:
            raise ValueError(f"{op}: vocab_size is the size of a vocabulary cut over a process_group, which is missing")
        return Cut("", 0, rows)
    _check_group(op, process_group)
    if vocab_size is None:
        # From what the ranks hold it could only be told by asking them all, and waiting, in every call.
        raise ValueError(f"{op}: vocab_size must say how many rows the ranks of process_group hold together, got None")
    ranks, rank, vocabulary = process_group.size(), dist.get_rank(process_group), vocab_size
    start, expected = min(rank * _length(vocabulary, ranks), vocabulary), _cut_sizes(vocabulary, ranks)[rank]
    if rows != expected:
        raise ValueError(
            f"{op}: of a vocabulary of {vocabulary} over {ranks} ranks, rank {rank} must hold {expected} rows of "
            f"linear_weight, got {rows}"
        )
    return Cut(process_group.group_name, start, vocabulary)


def local_parts(op: str, process_group, input: Tensor, target: Tensor, **head: Tensor | None) -> list:
    """Tensors that may be DTensors -> this rank's parts: of the head its rows, of input and target all."""
    from torch.distributed.tensor import DTensor, Replicate

    def part(name: str, x: Tensor | None, cut: bool) -> Tensor | None:
        if not isinstance(x, DTensor):
            return x
        if process_group is None:
            raise ValueError(
                f"{op}: {name} is a DTensor {x.placements}: give the process_group over which the vocabulary is cut "
                "and whose ranks have the same tokens (tensor parallel), or gather it (FSDP: in the module's forward)"
            )
        _check_group(op, process_group)
        ranks = dist.get_process_group_ranks(process_group)
        for dimension, placement in enumerate(x.placements):
            along = dist.get_process_group_ranks(x.device_mesh.get_group(dimension)) == ranks
            fits = placement.is_shard(0) if cut and along else placement.is_replicate()
            # Copies of a head on ranks with other tokens would each get another gradient.
            if fits and (not cut or along or x.device_mesh.size(dimension) == 1):
                continue
            rule = "cut by rows over process_group" if cut else "replicated"
            raise ValueError(
                f"{op}: {name} must be {rule}, and on no other dimension, got {x.placements} on {x.device_mesh}"
            )
        # dx is summed here; what flows back is the same on every rank.
        return x.to_local() if cut else x.to_local(grad_placements=[Replicate()] * len(x.placements))

    return [
        part("input", input, False),
        part("target", target, False),
        *(part(name, x, True) for name, x in head.items()),
    ]


def _group(name: str) -> dist.ProcessGroup:
    return process_group_of(name)


def parallel_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants, cut: Cut
) -> Statistics:
    """As `token_loss.statistics`, of the whole vocabulary, from this rank's logits [M, V_p]."""
    group = _group(cut.group_name)
    ranks = group.size()
    partials = partial_statistics(logits, target, weight, options, cut.shard, wants)
    partials = torch.cat((partials, partials.new_full((len(partials), 1), cut.vocabulary)), 1)
    gathered = partials.new_empty(ranks, *partials.shape)
    # torch 2.13 warns of the older name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.flatten(0, 1), partials, group=group)
    sizes = tuple(_cut_sizes(cut.vocabulary, ranks))
    found = combined_statistics(gathered[..., :-1], target, weight, scales, options, wants, sizes)
    # Ranks that were told different sizes cut different vocabularies.
    return found._replace(loss=found.loss.masked_fill((gathered[..., -1] != cut.vocabulary).any(), torch.nan))


def sum_over_ranks(x: Tensor, cut: Cut) -> None:
    """x becomes its sum over the ranks."""
    if cut.group_name:
        dist.all_reduce(x, group=_group(cut.group_name))
