"""Weights that the ranks of FSDP2 round to FP8 before they gather them, so that an all-gather moves one byte a value.

FSDP2 looks for two functions on the local tensor of each sharded parameter (`tigon.runtime.torch_private.fsdp`):

    fsdp_pre_all_gather     rounds the shard of this rank to e4m3, with the scale of the whole weight
    fsdp_post_all_gather    makes a `GatheredWeight` of the bytes of all ranks

The scale needs the maximum over all ranks. One all-reduce finds the maxima of all weights of a unit, when the first of
them is about to be gathered. It is repeated for every all-gather, so that a scale never belongs to earlier values, and
all ranks take part in the same collectives whatever happens on one of them.

The parameters themselves stay as they are: plain sharded tensors in their dtype, for the optimizer, for checkpoints and
for the norm of gradients. The two functions are attributes of the local tensors only while FSDP2 gathers them. So
tensors that `model.to` or `load_state_dict(assign=True)` has exchanged have the functions too, and copies and pickles
of parameters never have them.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.ops.fp8.formats import WEIGHT_DTYPE, Factor
from tigon.ops.fp8.gathered_weights import GatheredWeight
from tigon.ops.fp8.shards import find_maxima, maximum_of, round_shard
from tigon.recognition.fp8 import FP8_DTYPES
from tigon.recognition.replacement import installed_recipe
from tigon.runtime.torch_private import fsdp

# The numbers of units, which tell apart weights whose scales come from different all-reduces.
_numbers = itertools.count()

PRE_GATHER, POST_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def find_refusal(unit: fsdp.Unit, parameter: Any) -> str | None:
    """Return why a weight of a unit of FSDP2 cannot be gathered in FP8, or None if it can."""
    if (reason := fsdp.why_not_extensible(unit, parameter)) is not None:
        return reason
    if (dtype := fsdp.gathered_dtype(parameter)) not in FP8_DTYPES:
        return _describe_dtype(dtype)
    if hasattr(fsdp.local_shard(parameter), PRE_GATHER):
        return "another library gathers it in a format of its own"
    return None


def _describe_dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"it is gathered in {name}: use a model in bf16, or MixedPrecisionPolicy(param_dtype=torch.bfloat16)"


class _WeightGather:
    """The extension functions of one weight, and the index of the group of weights that share its scale."""

    def __init__(self, unit: "GatheredUnit", parameter: Any, group: int) -> None:
        # A strong reference would be a cycle through a tensor, which would delay the release of its memory.
        self.parameter = weakref.ref(parameter)
        self.unit, self.group = unit, group

    def shard(self) -> Tensor:
        """Return the tensor that FSDP2 asks for the two functions."""
        return fsdp.local_shard(self.parameter())

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let the tensor have the two functions in this block."""
        attributes = vars(self.shard())
        attributes[PRE_GATHER], attributes[POST_GATHER] = self.fsdp_pre_all_gather, self.fsdp_post_all_gather
        try:
            yield
        finally:
            del attributes[PRE_GATHER], attributes[POST_GATHER]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor, torch.Size]]:
        """Return the bytes that this rank gives to the all-gather, and the scale and the shape of the weight."""
        values, scale = self.unit.take(self, mesh, mp_policy.param_dtype)
        values = values.view(torch.uint8)
        # The last ranks have fewer rows than the first one if the rows cannot be divided by the ranks. All ranks give
        # the same number of bytes.
        padding = -(-outer_size[0] // mesh.size()) - len(values) if values.shape[1] == outer_size[1] else 0
        if padding > 0:
            values = torch.nn.functional.pad(values, (0, 0, 0, padding))
        return (values,), (scale, outer_size)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: tuple[Tensor, torch.Size], param_dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple] | None:  # fmt: skip
        """Return the weight that was gathered, or update the one of the last all-gather."""
        scale, shape = metadata
        values = outputs[0].view(-1)[: shape.numel()].view(shape).view(WEIGHT_DTYPE)
        if scale.is_cuda:
            # The scale was allocated on the stream on which the shards are copied.
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is None:
            return GatheredWeight.make(values, scale, (self.unit.number, self.group), param_dtype), ()
        assert isinstance(out, GatheredWeight)
        out.contents.values, out.contents.scale = values, scale
        return None


class GatheredUnit:
    """The weights of a unit of FSDP2 that are gathered in FP8.

    Args:
        unit: The unit.
        groups: Lists of weights that share a scale. A weight is a layer with an `FP8Recipe` and FSDP2's record of the
            weight's parameter.
    """

    def __init__(self, unit: fsdp.Unit, groups: Sequence[Sequence[tuple[nn.Module, Any]]]) -> None:
        self.unit = weakref.ref(unit)
        self.number = next(_numbers)
        self.group_count = len(groups)
        # The shards in FP8 of an all-gather that FSDP2 is preparing.
        self.rounded: dict[_WeightGather, Factor] = {}
        self.gathers: dict[nn.Module, _WeightGather] = {}
        for index, group in enumerate(groups):
            for layer, parameter in group:
                self.gathers[layer] = _WeightGather(self, parameter, index)
        # Lets FSDP2 gather the unit as before.
        self.stop: Callable[[], None] | None = None

    # --- start and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Gather the weights in FP8 from now on."""
        unit = self._reshard()
        with self.attached():
            for gather in self.gathers.values():
                fsdp.renew(unit, gather.parameter())
        self.stop = fsdp.surround_gathers(unit, self.attached)
        for layer in self.gathers:
            installed_recipe(layer).end_gather = self.end_for

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let the shards have their functions in this block, in which FSDP2 gathers them."""
        # An error may have ended an earlier all-gather before it took all shards.
        self.rounded.clear()
        with contextlib.ExitStack() as stack:
            for gather in self.gathers.values():
                stack.enter_context(gather.attached())
            yield

    def end_for(self, layer: nn.Module) -> None:
        """Gather the weight of a layer in its dtype from now on."""
        gather = self.gathers.get(layer)
        if gather is None or gather.parameter() is None or self.unit() is None:
            return
        # An error here leaves the weight gathered in FP8.
        fsdp.renew(self._reshard(), gather.parameter())
        del self.gathers[layer]
        if not self.gathers and self.stop is not None:
            self.stop()

    def _reshard(self) -> fsdp.Unit:
        """Free the gathered weights of the unit, and return the unit."""
        unit = self.unit()
        assert unit is not None
        for module in unit.modules:
            module.reshard()
        return unit

    # --- rounding --------------------------------------------------------------------------------------

    def take(self, gather: _WeightGather, mesh: Any, dtype: torch.dtype | None) -> Factor:
        """Return the shard of a weight in FP8. The first call of an all-gather rounds the shards of all weights."""
        if gather not in self.rounded:
            self.rounded = self._round(mesh.get_group(), dtype)
        return self.rounded.pop(gather)

    @torch.no_grad()
    def _round(self, group: Any, dtype: torch.dtype | None) -> dict[_WeightGather, Factor]:
        gathers = [*self.gathers.values()]
        shards = [gather.shard() if dtype is None else gather.shard().to(dtype) for gather in gathers]
        for shard in shards:
            if shard.dtype not in FP8_DTYPES:
                raise ValueError(
                    f"tigon.gather_in_fp8: a weight cannot be gathered in FP8: {_describe_dtype(shard.dtype)}"
                )
        groups: list[list[Tensor]] = [[] for _ in range(self.group_count)]
        for gather, shard in zip(gathers, shards, strict=True):
            groups[gather.group].append(shard)
        maxima = find_maxima(groups, shards[0].device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        return {
            gather: round_shard(shard, maximum_of(maxima, gather.group))
            for gather, shard in zip(gathers, shards, strict=True)
        }
