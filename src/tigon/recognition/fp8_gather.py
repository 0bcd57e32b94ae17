"""Weights that the ranks of FSDP2 round to FP8 before they gather them, so that an all-gather moves one byte a value.

FSDP2 looks for two functions on the local tensor of each sharded parameter (`tigon.runtime.torch_private.fsdp`):

    fsdp_pre_all_gather     rounds the shard of this rank to e4m3, with the scale of the whole weight
    fsdp_post_all_gather    makes a `GatheredWeight` of the bytes of all ranks

The scale needs the maximum over all ranks. One all-reduce finds the maxima of all weights of a unit, when the first of
them is about to be gathered. It is repeated for every all-gather, so that a scale never belongs to earlier values, and
all ranks take part in the same collectives whatever happens on one of them.

The parameters themselves stay as they are: plain sharded tensors in their dtype, for the optimizer, for checkpoints and
for the norm of gradients. The two functions are attributes of the local tensors. `model.to` and
`load_state_dict(assign=True)` exchange these tensors, so a hook before each forward sets the attributes again.
"""

import itertools
import weakref
from collections.abc import Sequence
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

__all__ = ["GatheredUnit", "find_refusal"]

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
    """The extension functions of one weight, and the weight's place among those that share its scale."""

    def __init__(self, unit: "GatheredUnit", parameter: Any, group: int) -> None:
        # A strong reference would be a cycle through a tensor, which would delay the release of its memory.
        self.parameter = weakref.ref(parameter)
        self.unit, self.group = unit, group

    def shard(self) -> Tensor:
        """Return the tensor that FSDP2 asks for the two functions."""
        return fsdp.local_shard(self.parameter())

    def attach(self) -> None:
        """Set the two functions, if the tensor does not have them."""
        shard: Any = self.shard()
        if getattr(shard, PRE_GATHER, None) != self.fsdp_pre_all_gather:
            setattr(shard, PRE_GATHER, self.fsdp_pre_all_gather)
            setattr(shard, POST_GATHER, self.fsdp_post_all_gather)

    def detach(self) -> None:
        """Remove the two functions."""
        attributes = vars(self.shard())
        attributes.pop(PRE_GATHER, None)
        attributes.pop(POST_GATHER, None)

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
        self.hooks: list[Any] = []

    # --- attributes and hooks ------------------------------------------------------------------------

    def start(self, model: nn.Module) -> None:
        """Gather the weights in FP8 from now on. The model's forward may let FSDP2 gather units in advance."""
        unit = self._reshard()
        for layer, gather in self.gathers.items():
            gather.attach()
            fsdp.renew(unit, gather.parameter())
            installed_recipe(layer).end_gather = self.end_for
        self.hooks = [self.watch(module) for module in dict.fromkeys((*unit.modules, model))]

    def watch(self, module: nn.Module) -> Any:
        """Let each forward of a module attach the functions before FSDP2 looks for them. Return the hook's handle."""
        return module.register_forward_pre_hook(_AttachAgain(self), prepend=True)

    def attach(self) -> None:
        """Set the functions of tensors that were exchanged since the last forward."""
        for gather in self.gathers.values():
            gather.attach()

    def end_for(self, layer: nn.Module) -> None:
        """Gather the weight of a layer in its dtype from now on."""
        gather = self.gathers.pop(layer, None)
        if gather is None or gather.parameter() is None or self.unit() is None:
            return
        unit = self._reshard()
        gather.detach()
        fsdp.renew(unit, gather.parameter())
        if not self.gathers:
            for hook in self.hooks:
                hook.remove()

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


class _AttachAgain:
    """The hook before a forward. It keeps neither the model nor its weights alive."""

    def __init__(self, unit: GatheredUnit) -> None:
        self.unit = weakref.ref(unit)

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and (unit := self.unit()) is not None:
            unit.attach()
