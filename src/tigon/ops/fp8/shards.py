"""The FP8 copy of the shard that a rank holds of a weight, with the scale of the whole weight.

    amax_r = max |w_r|        amax = max over ranks of amax_r, by one all-reduce for many weights
    q_r = round(w_r * (448 / amax)),  scale = amax / 448

The maxima are stored as the bits of fp32 numbers: for numbers >= 0, these integers have the same order. As an integer,
NaN is larger than infinity, so an all-reduce of integers keeps NaN, which one of floating-point numbers may drop.

Shapes: G groups of weights that share a scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.fp8.formats import WEIGHT_DTYPE, Factor, runs_fp8_kernels
from tigon.ops.fp8.quantisation import Layout, find_tensor_maximum, quantise_parts, quantise_reference

# The int32 elements for each group: 16 bytes, because the kernels expect aligned addresses.
_ELEMENTS = 4


def find_maxima(groups: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return the largest absolute values [4 G] of groups of shards, as bits in int32: that of group i is element 4 i.

    A shard has the shape [rows, columns], and may have no rows.
    """
    maxima = torch.zeros(_ELEMENTS * len(groups), dtype=torch.int32, device=device)
    for index, shards in enumerate(groups):
        maximum = maximum_of(maxima, index)
        for shard in shards:
            if runs_fp8_kernels(shard):
                find_tensor_maximum(shard, maximum)
            elif shard.numel():
                maximum.copy_(torch.maximum(maximum, shard.abs().amax().float().view(torch.int32)))
    return maxima


def maximum_of(maxima: Tensor, index: int) -> Tensor:
    """Return the maximum [1] of one group."""
    return maxima[_ELEMENTS * index : _ELEMENTS * index + 1]


def round_shard(shard: Tensor, maximum: Tensor) -> Factor:
    """Return a shard [rows, columns] in e4m3, and the scale [1] of the weight with this maximum."""
    layout = Layout(WEIGHT_DTYPE, False, True, False)
    if runs_fp8_kernels(shard):
        copies = quantise_parts(shard, [], layout, maximum)
    else:
        copies = quantise_reference(shard, layout, maximum.view(torch.float32)[0])
    assert copies.rows is not None
    assert copies.row_scale is not None
    return Factor(copies.rows, copies.row_scale)
