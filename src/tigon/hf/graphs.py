"""`tigon.patch(model, graphs=True)`: the training calls of transformers models as CUDA graphs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tigon.graphs.calls import NotCaptured, check_model, parameters_of
from tigon.graphs.forward import GraphedForward, GraphRecord, Preparation
from tigon.graphs.padding import ladder_length
from tigon.hf.checkpoints import layer_calls, transformers_models
from tigon.hf.packing import add_boundaries
from tigon.hf.padded_calls import PaddedForward
from tigon.hf.report import Report
from tigon.hf.transformers_private import attention_of, is_switched_on, masks_as_in_eager_calls
from tigon.recognition.parts.mixers import boundaries_in
from tigon.recognition.replacement import exchange, find_recipe, find_replacement, foreign_forward, install

# Arguments, and settings of the config, that request more outputs than a graph has.
_FURTHER_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def prepare_call(model: nn.Module, arguments: dict[str, Any]) -> Preparation:
    """Return a call that a graph can compute, and that gives the same results. If a mask is missing, and positions
    could show that the batch is packed, the host waits for the device once."""
    config: Any = getattr(model, "config", None)
    for name in _FURTHER_OUTPUTS:
        value = arguments.get(name)
        if getattr(config, name, False) if value is None else value:
            raise NotCaptured(f"{name} is set")
    use_cache = arguments.get("use_cache")
    if use_cache:
        raise NotCaptured("use_cache is set")
    if has_cache := use_cache is None and "use_cache" in parameters_of(type(model).forward):
        # A training call would fill a cache that nobody reads.
        arguments["use_cache"] = False
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        has_cache = getattr(text_config, "use_cache", False)
    has_mask = arguments.get("attention_mask") is not None
    # A hook of the model may compute boundaries from positions, for which the host waits.
    needs_boundaries = not has_mask and arguments.get("position_ids") is not None and boundaries_in(arguments) is None
    if needs_boundaries and any(add_boundaries in m._forward_pre_hooks.values() for m in _modules_above_layers(model)):
        raise NotCaptured("its recurrent layers need the boundaries of packed samples: pass cu_seq_lens_q")
    # Beside a mask or a cache, transformers does not separate the samples of a packed batch, except by flash-attn.
    has_cache = has_cache and "flash" not in attention_of(model)
    is_plain = not has_mask and (has_cache or _is_one_sample(arguments.get("position_ids")))
    embeds = arguments.get("inputs_embeds")
    tokens = arguments.get("input_ids") if embeds is None else embeds
    is_bucket = isinstance(tokens, Tensor) and tokens.dim() > 1 and ladder_length(tokens.shape[1]) == tokens.shape[1]
    return Preparation(arguments, masks_as_in_eager_calls if is_plain else contextlib.nullcontext, is_bucket)


def _modules_above_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model that are not in a list of layers. These are few, and each call visits them."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _modules_above_layers(child)


def _is_one_sample(positions: Any) -> bool:
    """Return whether positions [B, S] do not show several samples in a row."""
    if positions is None:
        return True
    return isinstance(positions, Tensor) and positions.dim() == 2 and bool((positions.diff(dim=-1) == 1).all())


def find_graphed_forward(module: nn.Module) -> GraphedForward | None:
    """Return the recipe with graphs among those that a module runs; None if there is none."""
    return find_recipe(module, GraphedForward)


def forget_graphs(model: nn.Module) -> None:
    """Drop the graphs of a model whose replaced modules are about to change."""
    for module in model.modules():
        if (forward := find_graphed_forward(module)) is not None:
            forward.forget()


def check_call_model(model: nn.Module) -> None:
    """Raise `NotCaptured` if no call of a model can be captured as it is now."""
    check_model(model)
    for module, call in layer_calls(model).items():
        if call.place.memory.offload and is_switched_on(module):
            raise NotCaptured(f"memory='{call.place.memory}' moves tensors to the host")


def install_graphs(model: nn.Module, report: Report) -> list[Callable[[], None]]:
    """Let the models of transformers in a module, and their bodies, run training calls as graphs. A trainer may call
    the body alone; inside a call of the model, the body is a part of the graphs of the model."""
    undo: list[Callable[[], None]] = []
    owners = [*transformers_models(model)] or [model]
    places = [place for owner in owners for place in (owner, getattr(owner, "base_model", None))]
    earlier_graphs = [f for p in places if isinstance(p, nn.Module) and (f := find_graphed_forward(p)) is not None]
    record = report.graphs = earlier_graphs[0].record if earlier_graphs else GraphRecord()
    for place in places:
        if not isinstance(place, nn.Module) or find_graphed_forward(place) is not None:
            continue
        replacement = find_replacement(place)
        if replacement is None and (reason := foreign_forward(place)):
            report.notes.append(f"graphs=True has no effect on {type(place).__name__}: {reason}")
            continue
        earlier: Any = None if replacement is None else replacement.recipe
        # Calls are padded before they are captured.
        padded = earlier if isinstance(earlier, PaddedForward) else None
        inner = earlier if padded is None else padded.inner
        graphed = GraphedForward(inner, record, prepare_call, check_call_model)
        undo.append(graphed.forget)
        undo.append(install(place, graphed) if padded is None else exchange(padded, "inner", graphed))
    return undo
