"""Weights that are gathered in FP8 from three ranks, which the rows of most weights cannot be divided by."""

import functools

from torch import nn
from torch.distributed.tensor import Shard

from hf.ways import SIZE
from hf.ways_fp8_gather import WORLD, one_byte, same_bits

assert SIZE["hidden_size"] % WORLD


def by_columns(weight: nn.Parameter) -> Shard:
    """Shard the weights whose columns can be divided by the ranks by columns, and all others by rows."""
    return Shard(1) if weight.dim() == 2 and weight.shape[1] % WORLD == 0 else Shard(0)


SETUPS = {
    "uneven rows": one_byte,
    "shards of columns": functools.partial(same_bits, shard_placement_fn=by_columns),
}
