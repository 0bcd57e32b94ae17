"""The functions that call the layers of a model with a checkpoint level, in place of `torch.utils.checkpoint`."""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tigon.memory.attention import AttentionOutputs, LayerAttention, attention_contexts_in_graph
from tigon.memory.layer_inputs import LayerInputs
from tigon.memory.layers import LayerJudgement
from tigon.memory.lean import lean, recompute_large_mlps
from tigon.memory.levels import Memory

_NOT_COMPILED = (
    "memory='checkpoint+offload' does not work in a compiled model, because a graph saves its tensors itself; compile "
    "only the layers, or use memory='checkpoint'"
)


class StackPlace(NamedTuple):
    """The place of a layer in a stack, and what the layers of the stack share."""

    number: int = 0
    # The object that moves the inputs of the layers to the host; None if they stay on the device.
    inputs: LayerInputs | None = None
    # The object that says which layers save the outputs of attention; None if no layer does.
    attention: LayerAttention | None = None
    memory: Memory = Memory("checkpoint")


class LayerCall:
    """Calls a layer once, in a block of `lean`, in place of the function that checkpoints the layer."""

    def __init__(self, layer: nn.Module | None, place: StackPlace | None = None) -> None:
        # The reference is weak, so that a deleted model frees its memory at once.
        self.layer: Callable[[], nn.Module | None] = (lambda: None) if layer is None else weakref.ref(layer)
        self.set_place(place or StackPlace())
        # The state of the layer's switch in the stock model. Undoing the level restores it.
        self.stock_state: dict[str, Any] = {}

    def __reduce__(self) -> tuple:
        return type(self), (self.layer(), self.place)

    def set_place(self, place: StackPlace) -> None:
        """Set the place of the layer in its stack, and add the layer to the object that moves its input."""
        self.place = place
        if place.inputs is not None and (layer := self.layer()) is not None:
            place.inputs.layers[place.number] = layer

    def __call__(self, function: Callable, *args: Any) -> Any:
        if self.place.inputs is not None:
            self.place.inputs.leave_layer(self.place.number)
        if torch.compiler.is_compiling():
            with lean():
                return function(*args)
        # Checkpointed layers recompute gate and up of large MLPs in tiles. If this layer saved them, it would need
        # more memory than those.
        with lean(), recompute_large_mlps():
            return function(*args)


class LayerCheckpoint(LayerCall):
    """Checkpoints a layer, or calls it once if a second run might differ. The layer may change after the patch, so each
    call compares the state that the judgement depends on."""

    def __init__(self, layer: nn.Module | None, place: StackPlace | None = None) -> None:
        super().__init__(layer, place)
        # A copied layer is judged at its first call, because it is incomplete before that.
        self.judgement: LayerJudgement | None = None

    def __call__(self, function: Callable, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            if self.place.inputs is not None:
                raise RuntimeError(_NOT_COMPILED)
            may_repeat = self._may_repeat_in_graph()
        elif may_repeat := self._may_repeat():
            layer, judgement = self.layer(), self.judgement
            assert layer is not None
            assert judgement is not None
            function = judgement.wrap_for_checkpoint(function, layer)
        if not may_repeat:
            return super().__call__(function, *args)
        number, inputs, attention, _ = self.place
        if attention is None or not attention.includes(number):
            run = functools.partial(checkpoint, function, *args, use_reentrant=False)
        elif torch.compiler.is_compiling():
            return checkpoint(function, *args, use_reentrant=False, context_fn=attention_contexts_in_graph)
        else:
            function = AttentionOutputs(function, attention, number, None if inputs is None else inputs.save_output)
            run = functools.partial(checkpoint, function, *args, use_reentrant=False)
        return run() if inputs is None else inputs.call(number, run, args[0] if args else None)

    def judge(self) -> str | None:
        """Return why the layer must not run twice; None if it may."""
        layer = self.layer()
        if layer is None:
            return "it is a shallow copy of a layer that was deleted"
        if self.judgement is None or not self.judgement.is_current(layer):
            self.judgement = LayerJudgement(layer)
        return self.judgement.reason

    def _may_repeat(self) -> bool:
        """Return whether the layer may run twice. Warn if it must not, for a reason that is new."""
        earlier = self.judgement and self.judgement.reason
        reason = self.judge()
        if reason not in (None, earlier):
            name = type(self.layer()).__name__
            warnings.warn(
                f"tigon: {name} is not checkpointed, because a second run might differ: {reason}", stacklevel=4
            )
        return reason is None

    @torch.compiler.assume_constant_result
    def _may_repeat_in_graph(self) -> bool:
        """Return whether the layer may run twice. A compiler runs this comparison once for each graph."""
        return self._may_repeat()
