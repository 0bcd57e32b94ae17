"""`tigon.patch(model, graphs=True)`: the training calls of transformers models as CUDA graphs."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.graphs.forward import GraphedForward, GraphRecord, Preparation
from tigon.graphs.signature import NotCaptured
from tigon.hf.checkpoints import transformers_models
from tigon.hf.spec import IGNORE_INDEX
from tigon.hf.transformers_private import masks_as_in_eager_calls
from tigon.memory.levels import Memory
from tigon.recognition.replacement import exchange, find_replacement, foreign_forward, install

# Arguments, and settings of the configuration, that request more outputs than a graph has.
_FURTHER_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def prepare_call(model: nn.Module, arguments: dict[str, Any]) -> Preparation:
    """Return a call that a graph can compute, and that gives the same results.

    A mask or positions that change nothing are left out, so that attention runs its kernel without a mask. For this,
    the host waits for the device once.

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
    for name in _useless_arguments(arguments):
        del arguments[name]
    is_plain = "attention_mask" not in arguments and "position_ids" not in arguments
    context = masks_as_in_eager_calls if is_plain else contextlib.nullcontext
    return Preparation(arguments, lambda output: output, context)


def _useless_arguments(arguments: dict[str, Any]) -> list[str]:
    """Return the names of a mask and of positions that do not change the results of a call.

    A mask changes nothing if it is 1 everywhere, or if it ends at the end of each sample and the loss ignores the
    tokens behind it: with causal attention, no token sees those to its right.
    """
    checks: dict[str, Tensor] = {}
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        is_kept = mask != 0
        useless = is_kept.all()
        labels = _targets(arguments)
        if labels is not None and labels.shape == mask.shape:
            ends_once = (is_kept[:, 1:] <= is_kept[:, :-1]).all() & is_kept[:, 0].all()
            useless |= ends_once & (is_kept | (labels == arguments.get("ignore_index", IGNORE_INDEX))).all()
        checks["attention_mask"] = useless
    if isinstance(positions, Tensor) and positions.dim() == 2:
        checks["position_ids"] = (positions == torch.arange(positions.shape[1], device=positions.device)).all()
    flags = torch.stack([*checks.values()]).tolist() if checks else []
    return [name for name, flag in zip(checks, flags, strict=True) if flag]


def _targets(arguments: dict[str, Any]) -> Tensor | None:
    """Return the label that each position predicts, or None."""
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    if isinstance(shifted, Tensor):
        return shifted
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return None
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=arguments.get("ignore_index", IGNORE_INDEX))


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
            recipe = GraphedForward(None if replacement is None else replacement.recipe, record, prepare_call)
            if memory.offload:
                recipe.obstacle = f"memory='{memory}' moves tensors to the host"
            undo.append(recipe.forget)
            undo.append(install(place, recipe) if replacement is None else exchange(replacement, recipe))
    return undo
