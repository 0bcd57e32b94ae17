"""`tigon.patch(model, graphs=True)`: the training calls of transformers models as CUDA graphs."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.graphs.forward import GraphedForward, GraphRecord, Preparation
from tigon.graphs.padding import ladder_length
from tigon.graphs.signature import NotCaptured
from tigon.hf.checkpoints import transformers_models
from tigon.hf.padded_calls import PaddedForward
from tigon.hf.transformers_private import masks_as_in_eager_calls
from tigon.memory.levels import Memory
from tigon.recognition.replacement import exchange, find_replacement, foreign_forward, install

# Arguments, and settings of the configuration, that request more outputs than a graph has.
_FURTHER_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def prepare_call(model: nn.Module, arguments: dict[str, Any]) -> Preparation:
    """Return a call that a graph can compute, and that gives the same results.

    Positions that count from zero are left out. For this, the host waits for the device once.

    Raises:
        NotCaptured: No graph can compute the call.
    """
    arguments = {name: x for name, x in arguments.items() if x is not None}
    config = getattr(model, "config", None)
    for name in _FURTHER_OUTPUTS:
        if arguments.get(name, getattr(config, name, False)):
            raise NotCaptured(f"{name} is set")
    # A training call would fill a cache that nobody reads.
    arguments.setdefault("use_cache", False)
    has_mask = "attention_mask" in arguments
    if not has_mask and _counts_from_zero(arguments.get("position_ids")):
        del arguments["position_ids"]
    is_plain = not has_mask and "position_ids" not in arguments
    tokens: Any = arguments.get("input_ids", arguments.get("inputs_embeds"))
    is_bucket = isinstance(tokens, Tensor) and tokens.dim() > 1 and ladder_length(tokens.shape[1]) == tokens.shape[1]
    return Preparation(arguments, masks_as_in_eager_calls if is_plain else contextlib.nullcontext, is_bucket)


def _counts_from_zero(positions: Any) -> bool:
    """Return whether positions [B, S] are those that a model gives to tokens if it gets none."""
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    return bool((positions == torch.arange(positions.shape[1], device=positions.device)).all())


def find_graphed_forward(module: nn.Module) -> GraphedForward | None:
    """Return the recipe with graphs among those that a module runs; None if there is none."""
    replacement = find_replacement(module)
    recipe: Any = None if replacement is None else replacement.recipe
    while recipe is not None and not isinstance(recipe, GraphedForward):
        recipe = getattr(recipe, "inner", None)
    return recipe


def forget_graphs(model: nn.Module) -> None:
    """Drop the graphs of a model whose replaced modules are about to change."""
    for module in model.modules():
        if (forward := find_graphed_forward(module)) is not None:
            forward.forget()


def install_graphs(model: nn.Module, record: GraphRecord, memory: Memory) -> list[Callable[[], None]]:
    """Let the models of transformers in a module, and their bodies, run their training calls as graphs.

    A trainer may call the body alone. Inside a call of the model, the body is a part of the graphs of the model.
    """
    undo: list[Callable[[], None]] = []
    owners = [*transformers_models(model)] or [model]
    for owner in owners:
        for place in (owner, getattr(owner, "base_model", None)):
            if not isinstance(place, nn.Module) or find_graphed_forward(place) is not None:
                continue
            replacement = find_replacement(place)
            if replacement is None and foreign_forward(place):
                continue
            earlier: Any = None if replacement is None else replacement.recipe
            # Calls are padded before they are captured.
            padded = earlier if isinstance(earlier, PaddedForward) else None
            graphed = GraphedForward(earlier if padded is None else padded.inner, record, prepare_call)
            if memory.offload:
                graphed.obstacle = f"memory='{memory}' moves tensors to the host"
            undo.append(graphed.forget)
            if padded is not None:
                undo.append(_run_inside(padded, graphed))
            else:
                undo.append(install(place, graphed) if replacement is None else exchange(replacement, graphed))
    return undo


def _run_inside(padded: PaddedForward, graphed: GraphedForward) -> Callable[[], None]:
    """Let a forward that pads calls run the one with graphs. Return the function that undoes this."""
    inner, padded.inner = padded.inner, graphed

    def undo() -> None:
        if padded.inner is graphed:
            padded.inner = inner

    return undo
