"""When a quantised weight may be used again in a later call. A version is not enough to be sure that it is current:

- FSDP and ZeRO-3 write gathered values without a new version, so their weights are not cached (`keeps_versions`).
- An optimizer may write through `weight.data`. The copies of a trained weight therefore serve one step only: from its
  first forward until `weight.grad` is None again.
- A merge of adapters writes through `data` too. A base is cached only for the ops that add its adapters, and until it
  is called by itself, which is how a merged base is called.
- The frozen weights of a teacher may be averages, so copies without adapters serve until an optimizer steps.
- A CUDA graph must contain the quantisation of all weights, which have other values at each replay.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.memory.lean import in_checkpoint, is_checkpoint_recomputation
from tigon.ops.fp8.weights import WeightCache
from tigon.runtime.device import is_capturing
from tigon.runtime.engines import keeps_versions


class StepCache:
    """The cache of a group of weights, which `find` returns where it is known to be correct. With `keeps_copies`,
    backward uses the copies that the forward has made, except in checkpointed layers. Otherwise a step makes them again
    in backward, and only a step of several backwards fills the cache, because it uses the copies more than once."""

    def __init__(self, keeps_copies: bool) -> None:
        self.keeps_copies = keeps_copies
        self.cache: WeightCache | None = None
        self.weights: list[weakref.ref[Tensor]] = []
        self.addresses: list[int] = []
        # True if gradients existed at the last forward of a step, because they accumulate over several backwards.
        self.is_accumulating = False
        # The `merges` of the weights for which the copies of frozen weights were made.
        self.merges: tuple[int | None, ...] = ()

    def find(self, weights: Sequence[Tensor], merges: Sequence[int | None]) -> WeightCache | None:
        """Return the cache for a call with these weights; None if the call must quantise them. `merges` holds a number
        for each weight with adapters, which changes when adapters are merged into it."""
        trained_weights = [weight for weight in weights if weight.requires_grad]
        if is_capturing(weights[0]) or not all(map(keeps_versions, weights)):
            self.cache = None
            return None
        if not trained_weights:
            return self._find_for_frozen(weights, merges)
        has_gradient = any(weight.grad is not None for weight in trained_weights)
        if is_checkpoint_recomputation() or not torch.is_grad_enabled():
            # The second run of a checkpointed layer, and an evaluation between two backwards, are part of the step.
            is_in_step = has_gradient or is_checkpoint_recomputation()
            return self.cache if is_in_step and self._belongs_to(weights) else None
        was_accumulating, self.is_accumulating = self.is_accumulating, has_gradient
        if not has_gradient:
            # A step has begun, and the copies of the last one are out of date. A checkpointed layer must save little.
            keeps_copies = self.keeps_copies and not in_checkpoint()
            self._renew(weights if keeps_copies or was_accumulating else None)
        elif not self._belongs_to(weights):
            self._renew(weights)
        return self.cache

    def _find_for_frozen(self, weights: Sequence[Tensor], merges: Sequence[int | None]) -> WeightCache | None:
        if self.merges != tuple(merges) or not self._belongs_to(weights):
            # If all weights are bases of adapters, no code but a merge is expected to change them.
            self._renew(weights, keeps_frozen=None not in merges)
            self.merges = tuple(merges)
        return self.cache

    def _belongs_to(self, weights: Sequence[Tensor]) -> bool:
        """Return whether there is a cache, and it belongs to these weights, whose values have not been moved."""
        if self.cache is None or len(weights) != len(self.weights):
            return False
        is_same = all(ref() is weight for ref, weight in zip(self.weights, weights, strict=True))
        return is_same and self.addresses == [weight.data_ptr() for weight in weights]

    def _renew(self, weights: Sequence[Tensor] | None, keeps_frozen: bool = False) -> None:
        self.cache = None if weights is None else WeightCache(keeps_frozen)
        self.weights = [weakref.ref(weight) for weight in weights or ()]
        self.addresses = [weight.data_ptr() for weight in weights or ()]
