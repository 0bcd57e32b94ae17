r"""Kernels of a loss over logits a + h B^T, where a product has written a and h B^T is a low-rank addition.

Neither kernel writes a + h B^T to memory. Each one computes the tile of h B^T that belongs to a tile of a on tensor
cores, and adds both in fp32. The result is therefore not rounded to the dtype of the logits.

    statistics    reads a                    max, sum of exponentials, ..., and the loss, of each token
    gradient      reads a and writes da      da = d(loss) / d(a + h B^T),   dh = da B

The gradient kernel reads da from registers for dh. A third kernel, `token_sums` of `ops/adapters/low_rank.py`, reads da
from memory for dB = da^T h. Bytes of memory traffic for each logit in a half-precision dtype, of which the loss without
the addition takes 4 (or 6, if a row does not fit on the chip):

    these kernels                                                                    2 + 4 + 2          = 8
    write h B^T, a += h B^T in the product, loss, read da for dh, read da for dB     2 + 2 + 4 + 2 + 2  = 12

dB in the gradient kernel would save two bytes. But each program would compute the dB of its tokens, which is a part of
the sum over all tokens, and write it to memory. It would also need so many registers that few programs share a
multiprocessor. On an H200, for 8192 tokens, 128256 columns and rank 16, the gradient and dB take 2.0 ms by two kernels,
and 2.4 ms by one kernel and the sum of its parts.

A program of either kernel has `block_t` tokens and loops over a part of the vocabulary. In the statistics kernel, the
program of these tokens that finishes last combines the parts, as `token.shards` combines shards. In the gradient
kernel, h and the sum of dh stay on the chip.

`ops/logits/token/kernels.py` has the maths of the loss, and `ops/adapters/low_rank.py` that of the terms which stand
for h, B and, in fp16, da in the products.

Shapes: M tokens of a chunk, V vocabulary, R rank, S terms, P parts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.low_rank import TERMS, PartTiles, rank_block
from tigon.ops.head.low_rank_loss_kernels import low_rank_gradient_kernel, low_rank_statistics_kernel
from tigon.ops.logits.token.kernels import empty_statistics, option_numbers
from tigon.ops.logits.token.types import Options, SavedStatistics, Statistics, Upstream, Wants
from tigon.runtime.counters import zero_counters
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import in_order, launch, on_device
from tigon.runtime.tuning import LaunchConfig

# The largest rank for which the gradient kernel computes dh. The tiles of rank 64 would not fit in the registers.
LARGEST_RANK_WITH_DH = 32

# A product of two factors consists of the products of their terms i and j with i + j < ORDER. With two terms, h and B
# are exact to 2^-17, which is far below the rounding of da. With one term they would be exact to 2^-9, and the error of
# logits with a large addition more than twice that of eager code, which computes an fp32 product.
ORDER = 2


# --- configuration -------------------------------------------------------------------------------


class LowRankLossProblem(NamedTuple):
    """The sizes that the launch parameters of the two kernels depend on."""

    rank: int
    # bytes of a logit
    itemsize: int
    # whether a soft cap, label smoothing or the entropy takes more registers
    is_complex: bool


def _stages(problem: LowRankLossProblem, device: Device) -> int:
    """Return how many tiles a program loads ahead. Those of a higher rank would not fit in the shared memory."""
    return 3 if device.async_copy and problem.rank <= 64 else 1


@dataclass(frozen=True)
class LowRankStatisticsConfig(PartTiles, LaunchConfig):
    """Launch parameters: a program has `block_t` tokens and loops over the tiles of a part of the vocabulary."""

    @staticmethod
    def heuristic(problem: LowRankLossProblem, device: Device) -> "LowRankStatisticsConfig":
        # Four programs of a multiprocessor hide each other's waits better than two with twice the tokens. The other
        # options need more registers for each token.
        tokens, threads, programs = (128, 256, 2) if problem.is_complex else (64, 128, 4)
        return LowRankStatisticsConfig(
            block_t=tokens, block_n=64, num_warps=threads // device.warp_size, num_stages=_stages(problem, device),
            programs_per_multiprocessor=programs,
        )  # fmt: skip


@dataclass(frozen=True)
class LowRankGradientConfig(PartTiles, LaunchConfig):
    """Launch parameters: a program has `block_t` tokens and loops over the tiles of a part of the vocabulary."""

    @staticmethod
    def heuristic(problem: LowRankLossProblem, device: Device) -> "LowRankGradientConfig":
        # Three programs of a multiprocessor hide each other's waits. Milliseconds for 8192 tokens, 128256 columns and
        # rank 16 on an H200: 1.35, and 1.74 with 128 tokens for each program. A loss with more intermediate values
        # and a high rank need smaller tiles.
        is_small = problem.is_complex or problem.rank > LARGEST_RANK_WITH_DH
        stages = _stages(problem, device)
        return LowRankGradientConfig(
            block_t=64, block_n=32 if is_small else 64, num_warps=128 // device.warp_size,
            num_stages=min(stages, 2) if problem.is_complex else stages, programs_per_multiprocessor=3,
        )  # fmt: skip


# --- launchers -----------------------------------------------------------------------------------


class LowRankTerms(NamedTuple):
    """The bf16 terms of the factors of the addition, for the tokens of a chunk."""

    # [S, M, R]
    h: Tensor
    # [S, V, R], contiguous
    b: Tensor


def _shared_arguments(logits: Tensor, terms: LowRankTerms, options: Options) -> tuple[dict, dict]:
    """Return the arguments and the constexprs that both kernels take."""
    h, b = terms
    arguments = {
        "h_ptr": h, "b_ptr": b, "M": logits.shape[0], "V": logits.shape[1],
        "stride_logits": logits.stride(0), "stride_h": h.stride(1), "stride_h_term": h.stride(0),
        "stride_b_term": b.stride(0),
        **option_numbers(options),
    }  # fmt: skip
    constexprs = {
        "SMOOTHING": options.label_smoothing != 0, "SCALED": options.logit_scale != 1,
        "SOFTCAP": options.softcap is not None,
        "R": b.shape[2], "ORDER": ORDER, "H_TERMS": min(len(h), ORDER), "B_TERMS": min(len(b), ORDER),
    }  # fmt: skip
    return arguments, constexprs


@on_device
def low_rank_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, terms: LowRankTerms, options: Options,
    wants: Wants,
) -> Statistics:  # fmt: skip
    """Return the statistics of logits + h B^T, for logits [M, V] that do not contain the addition yet."""
    (m, v), device, r = logits.shape, device_of(logits), terms.b.shape[2]
    result = empty_statistics(logits, options, wants)
    is_complex = options.softcap is not None or options.label_smoothing != 0 or wants.entropy
    config = LowRankStatisticsConfig.choose(LowRankLossProblem(r, logits.element_size(), is_complex), device)
    blocks = cdiv(m, config.block_t)
    part_length, parts = config.divide(v, config.block_n, blocks, device)
    arguments, constexprs = _shared_arguments(logits, terms, options)
    or_none = lambda x: x if x.numel() else None
    launch(
        low_rank_statistics_kernel, blocks * parts,
        *in_order(low_rank_statistics_kernel)(
            logits_ptr=logits, target_ptr=target, weight_ptr=weight, scales_ptr=scales,
            partial_ptr=logits.new_empty((6, parts, m), dtype=torch.float32),
            counter_ptr=zero_counters(logits, blocks), loss_ptr=result.loss, lse_ptr=result.lse,
            z_ptr=or_none(result.z_loss), predicted_ptr=or_none(result.predicted),
            log_prob_ptr=or_none(result.log_probs), entropy_ptr=or_none(result.entropy),
            part_length=part_length, parts=parts, **arguments,
        ),
        **constexprs, TOKEN_SCALING=options.token_scaling, BLOCK_T=config.block_t, BLOCK_V=config.block_n,
        BLOCK_R=rank_block(r), HAS_WHOLE_TILES=v % config.block_n == 0, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return result


@on_device
def low_rank_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, terms: LowRankTerms,
    saved: SavedStatistics, upstream: Upstream, options: Options, needs_dh: bool,
) -> Tensor | None:  # fmt: skip
    """Overwrite logits [M, V], which do not contain h B^T, with the gradient of the loss of logits + h B^T.

    `saved` holds what `token.kernels.gradient` needs. dh [M, R] in fp32 is returned if it is needed; the rank may then
    be `LARGEST_RANK_WITH_DH` at most.
    """
    (m, v), device, r = logits.shape, device_of(logits), terms.b.shape[2]
    is_complex = options.softcap is not None or options.label_smoothing != 0 or upstream.entropy is not None
    config = LowRankGradientConfig.choose(LowRankLossProblem(r, logits.element_size(), is_complex), device)
    blocks = cdiv(m, config.block_t)
    part_length, parts = config.divide(v, config.block_n, blocks, device)
    dh = logits.new_empty((parts, m, r), dtype=torch.float32) if needs_dh else None
    dense = lambda x: None if x is None else x.contiguous()
    dloss = upstream.loss
    arguments, constexprs = _shared_arguments(logits, terms, options)
    launch(
        low_rank_gradient_kernel, blocks * parts,
        *in_order(low_rank_gradient_kernel)(
            logits_ptr=logits, target_ptr=target, weight_ptr=weight, scales_ptr=scales, lse_ptr=saved.lse,
            log_prob_ptr=saved.log_probs if options.token_scaling else None,
            entropy_ptr=None if upstream.entropy is None else saved.entropy,
            dloss_ptr=dloss, dlog_prob_ptr=dense(upstream.log_probs), dentropy_ptr=dense(upstream.entropy),
            dh_ptr=dh, part_length=part_length, parts=parts,
            stride_dloss=dloss.stride(0) if dloss is not None and dloss.dim() else 0, **arguments,
        ),
        **constexprs, DA_TERMS=TERMS[logits.dtype], BLOCK_T=config.block_t, BLOCK_V=config.block_n,
        BLOCK_R=rank_block(r), HAS_WHOLE_TILES=v % config.block_n == 0, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return None if dh is None else dh.sum(0) if parts > 1 else dh[0]
