"""A loss whose vocabulary is sharded over ranks, like the output layer of a tensor-parallel model.

Rank p of P holds columns [start_p, start_p + V_p) of the logits, or the same rows of a head from which it computes
them, and all ranks have the same tokens. One all-gather exchanges a few numbers per token (those of
`partial_statistics`, and V), from which every rank computes the statistics of the whole vocabulary. Each rank then
computes its columns of d(logits). With a head, dW is local, and dx is summed over the ranks.

Let m_p, S_p, R_p and Q_p be the m, S, R and Q of `token.scan` for the columns of rank p, and m = max_p m_p. Then

    S = sum_p S_p exp(m_p - m),   R = sum_p (R_p + (m_p - m) S_p) exp(m_p - m),   Q = sum_p Q_p exp(m_p - m)^2

On every rank, targets are indices of the whole vocabulary and class weights are [V].

Shapes: M tokens, H hidden, V vocabulary, P ranks; C = 6 + 1 (with Q) + K numbers of a token with K extra targets.
Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.ops.logits.token.kernels import Options, Shard, Statistics, Wants, statistics
from tigon.ops.logits.token.reference import LOWEST, Sums, extra_logits_torch, statistics_of
from tigon.runtime import checks
from tigon.runtime.compat.operators import process_group_of
from tigon.runtime.device import cdiv


def _rows_per_rank(vocabulary: int, ranks: int) -> int:
    """Return the rows of a rank. The last ranks hold the remaining rows, as in `torch.chunk` and in DTensors."""
    return cdiv(vocabulary, ranks)


def _shard_sizes(vocabulary: int, ranks: int) -> list[int]:
    rows = _rows_per_rank(vocabulary, ranks)
    return [max(0, min(rows, vocabulary - p * rows)) for p in range(ranks)]


def largest_shard(shard: Shard) -> int:
    """Return the rows of the largest shard, from which all ranks derive the size of a chunk, because chunks contain
    collectives."""
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
    """Check the arguments that describe a sharded vocabulary, and return the shard of this rank. `rows` is the number
    of classes that this rank holds. They are rows of a head or columns of logits, as `unit` says. `name` is the name
    that the op has for the tensor that holds them."""
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
    """Return the local tensors of an input and a target, which must be replicated, and of the tensors of a head, which
    must be sharded by rows over `process_group`. `names` are those of the input and the target."""
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


def partial_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, shard: Shard, wants: Wants,
    extra_targets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return C numbers [M, C] fp32 of each row of a shard [M, v], the input of `combined_statistics`. The columns are
    m; S; x_t, or 0 if another shard holds it; sum w (x - m), 0 without label smoothing and `wants.mean_logits`; R, 0
    unless `wants.entropy`; the index of the largest logit, 0 unless `wants.predicted`; with `wants.sum_sq_probs` Q; x_k
    of each extra target, or 0 if another shard holds it. All are 0 for ignored tokens."""
    (m, v), start = logits.shape, shard.start
    partials = logits.new_zeros(m, 6 + wants.sum_sq_probs + wants.extra_targets, dtype=torch.float32)
    if v == 0:
        partials[:, 0], partials[:, 5] = -torch.inf, start
        return partials
    is_valid, needs_sum = target != options.ignore_index, options.label_smoothing != 0 or wants.mean_logits
    local = target[:, None] if extra_targets is None else torch.cat((target[:, None], extra_targets), 1)
    local = local - start
    x = extra_logits_torch(logits, local, options).where((local >= 0) & (local < v), 0.0)
    partials[:, 2], partials[:, partials.shape[1] - wants.extra_targets :] = x[:, 0], x[:, 1:]
    # The loss with a label smoothing of 1 does not depend on the target: it is the sum of w (lse - x), divided by v.
    smoothed = Options(-1, float(needs_sum), options.softcap, options.logit_scale)
    weight = weight[start : start + v].contiguous() if weight is not None and needs_sum else None
    scales = logits.new_ones(3, dtype=torch.float32)
    scales[2] = v if weight is None else weight.float().sum()
    any_target = local[:, 0].clamp(0, v - 1).where(is_valid, -1)
    requested = Wants(predicted=wants.predicted, entropy=wants.entropy, sum_sq_probs=wants.sum_sq_probs)
    result = statistics(logits, any_target, weight, scales, smoothed, requested)
    total = result.lse[:, 1]
    log_total = total.log()
    partials[:, 0], partials[:, 1] = result.lse[:, 0].where(total != 0, -torch.inf), total
    if needs_sum:
        # A class of probability 0 makes the loss infinite, or NaN if it is the target.
        partials[:, 3] = (scales[2] * log_total - v * result.loss).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    if wants.entropy:
        partials[:, 4] = (total * (log_total - result.entropy)).where(total != 0, 0.0)
    if wants.predicted:
        partials[:, 5] = result.predicted + start
    if result.log_sum_sq_probs is not None:
        partials[:, 6] = (result.log_sum_sq_probs + 2.0 * log_total).exp().where(total != 0, 0.0)
    return partials.masked_fill_(~is_valid[:, None], 0.0)


def combined_statistics(
    partials: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants,
    sizes: tuple[int, ...], extra_targets: Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Return the statistics of the whole vocabulary, from partials [P, M, C] of shards with `sizes` columns."""
    tops, totals, x_t, weighted, moments, argmax = partials[..., :6].unbind(-1)  # [P, M] each
    highest = tops.amax(0)
    top = highest.where(highest != -torch.inf, 0.0)
    fall = tops - top
    factor = fall.exp()
    moment = (factor * (moments + fall.clamp(min=LOWEST) * totals)).sum(0)
    weighted_sum = None
    if options.label_smoothing or wants.mean_logits:
        # The sum of a shard whose logits are all -inf is relative to 0, not to its maximum.
        shift = tops.where(tops != -torch.inf, 0.0) - top
        masses = sizes if weight is None else [part.sum() for part in weight.float().split(sizes)]
        weighted_sum = sum((weighted[p] + mass * shift[p] for p, mass in enumerate(masses)), torch.zeros_like(top))
    first_argmax = argmax.where(tops == highest, float(sum(sizes))).amin(0).long()
    squares = (partials[..., 6] * factor.square()).sum(0) if wants.sum_sq_probs else None
    x_k = None if extra_targets is None else partials[..., -wants.extra_targets :].sum(0) - top[:, None]
    sums = Sums(top, (totals * factor).sum(0), x_t.sum(0) - top, weighted_sum, moment, first_argmax, squares, x_k)
    return statistics_of(sums, target, weight, scales, options, wants, sum(sizes), extra_targets)


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
