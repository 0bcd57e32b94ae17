"""Checkpointed layers of transformers' models: the switch of each layer calls a function of the memory level.

The switches are on only while gradients are computed. A checkpointed layer gets no cache, so `generate` would otherwise
choose each token without the tokens before it. If a model has a level that checkpoints, its methods
`gradient_checkpointing_enable()` and `gradient_checkpointing_disable()` switch this level on and off.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tigon.hf.layer_checkpoint import LayerCall, LayerCheckpoint, StackPlace
from tigon.hf.transformers_private import (
    attention_of,
    checkpoint_function,
    checkpoint_refusal,
    has_checkpoint_switch,
    is_checkpoint_layer,
    is_switched_on,
    restore_switch,
    set_switch,
    switch_state,
)
from tigon.memory.attention import LayerAttention
from tigon.memory.layer_inputs import LayerInputs
from tigon.memory.lean import lean
from tigon.memory.levels import Memory
from tigon.recognition.replacement import find_replacement, foreign_forward, install

# A head is large if the ratio of its parameters to those of a layer exceeds this number. According to `tigon plan`, the
# peak memory of a step changes by -2 % to +2 % if the last layer runs once and the ratio is at most 5 (Llama-3-8B,
# Llama-3.2-1B, Qwen3-4B), and by +2 % to +14 % if the ratio is at least 8.
LARGE_HEAD = 5


def explain_no_lean_block() -> str | None:
    """Enter a block of `lean`. Return the message of the error that it raises; None if it raises none."""
    try:
        with lean():
            return None
    # torch raises this error where saved-tensor hooks are forbidden.
    except RuntimeError as error:
        return str(error)


def transformers_models(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost transformers models in a module. The module may itself be one of them, or contain them."""
    if hasattr(type(module), "gradient_checkpointing_enable"):
        yield module
    else:
        for child in module.children():
            yield from transformers_models(child)


def _decoder(model: Any) -> nn.Module:
    """Return the decoder of a model, without encoders and vision towers; the model itself if it names none."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the stack with the most parameters in the decoder, or in the model if that has no stack."""
    for place in (_decoder(model), model):
        stacks = [[*module] for module in place.modules() if isinstance(module, nn.ModuleList) and len(module)]
        if stacks := [stack for stack in stacks if all(map(is_checkpoint_layer, stack))]:
            # The parameters of all stacks may be empty if an engine shards them.
            return max(stacks, key=lambda stack: (sum(p.numel() for m in stack for p in m.parameters()), len(stack)))
    return []


def is_eager(owner: Any) -> bool:
    """Return whether the decoder of a model computes attention by single operators, and not by a kernel."""
    return attention_of(_decoder(owner)) == "eager"


def explain_no_checkpoint(model: nn.Module) -> str | None:
    """Return why the model cannot be checkpointed by its own switch; None if it can."""
    owners = list(transformers_models(model))
    if not owners:
        return (
            "it is not a transformers model, so its layers have no switch for gradient checkpointing; "
            "call them through torch.utils.checkpoint yourself"
        )
    return next((reason for owner in owners if (reason := checkpoint_refusal(owner)) is not None), None)


def _last_layer(owner: Any) -> nn.Module | None:
    """Return the last layer if it should run only once and save its activations for backward; None otherwise. The
    model, or its decoder, must have exactly one stack of layers. The backward of the last layer comes first, so
    recomputing it would take the same memory a moment later, after the head and its loss. The head and its loss take
    less memory than the backward of a layer, unless the vocabulary is large and the layers are small."""
    if explain_no_lean_block():
        return None
    stacks = [m for m in _decoder(owner).modules() if isinstance(m, nn.ModuleList) and any(map(is_checkpoint_layer, m))]
    if len(stacks) != 1 or not all(map(is_checkpoint_layer, stacks[0])):
        return None
    last, head = stacks[0][-1], getattr(owner.get_output_embeddings(), "weight", None)
    size = sum(p.numel() for p in last.parameters())
    return last if head is None or head.numel() <= LARGE_HEAD * size else None


def layer_calls(model: nn.Module) -> dict[nn.Module, LayerCall]:
    """Return the functions of a level that call the layers of a model, by the module that has the switch."""
    functions = {module: checkpoint_function(module) for module in model.modules()}
    return {module: function for module, function in functions.items() if isinstance(function, LayerCall)}


def switch_on(model: nn.Module, memory: Memory) -> list[Callable[[], None]]:
    """Checkpoint the layers of a model at a level, in place of other checkpoints; return the functions to undo this."""
    undo: list[Callable[[], None]] = []
    for owner in transformers_models(model):
        undo.append(_change_places(owner, memory) if layer_calls(owner) else _install_calls(owner, memory))
        undo += [_install_body(body) for body in owner.modules() if _is_body(body)]
    return undo


def switch_off(model: nn.Module) -> Callable[[], None]:
    """Switch the checkpoint level of an earlier patch off; return the function that switches it on again."""
    calls = {module: call for module, call in layer_calls(model).items() if is_switched_on(module)}
    return _set_switches(calls, on=False)


def _set_switches(calls: dict[nn.Module, LayerCall], *, on: bool) -> Callable[[], None]:
    """Switch functions of a level on or off; return the function that undoes this."""
    earlier = {module: is_switched_on(module) for module in calls}
    for module, call in calls.items():
        set_switch(module, call, on)

    def undo() -> None:
        for module, call in calls.items():
            # Other code may have set another function since.
            if checkpoint_function(module) is call:
                set_switch(module, calls[module], earlier[module])

    return undo


def _install_calls(owner: nn.Module, memory: Memory) -> Callable[[], None]:
    """Let the switches of a model call functions of this level, which use non-reentrant checkpoints."""
    last = _last_layer(owner)
    places = _find_places(owner, memory, last)
    modules = [module for module in owner.modules() if has_checkpoint_switch(module)]
    calls = {m: (LayerCall if m is last else LayerCheckpoint)(m, places[m]) for m in modules}
    for module, call in calls.items():
        call.stock_state = switch_state(module)
        set_switch(module, call, True)
        if isinstance(call, LayerCheckpoint) and is_innermost(module):
            call.judge()

    def undo() -> None:
        for module, call in calls.items():
            if checkpoint_function(module) is call:
                restore_switch(module, calls[module].stock_state)

    return undo


def is_innermost(module: nn.Module) -> bool:
    """Return whether a module has the switch for checkpointing, and no module inside it has one."""
    return has_checkpoint_switch(module) and sum(map(has_checkpoint_switch, module.modules())) == 1


def _find_places(owner: nn.Module, memory: Memory, last: nn.Module | None) -> dict[nn.Module, StackPlace]:
    """Return the place of each module of a model in the stack of decoder layers. `last` is the layer that is not
    checkpointed, if there is one. The level moves the inputs of the layers in the stack to the host, or saves the
    outputs of their attention. Layers outside of the stack save the outputs of attention too, unless the level limits
    this to a number of layers."""
    layers = decoder_layers(owner)
    checkpointed = len(layers) - (last in layers)
    inputs = attention = None
    if memory.offload:
        inputs = LayerInputs(memory.counts["offload"], checkpointed, bool(memory.attention))
    if memory.attention:
        # The report has a line about eager attention, so no warning follows.
        attention = LayerAttention(memory.counts["attention"], checkpointed, warns=not is_eager(owner))
    others = LayerAttention() if memory.attention is True else None
    places = {module: StackPlace(0, None, others, memory) for module in owner.modules()}
    return places | {module: StackPlace(i, inputs, attention, memory) for i, module in enumerate(layers)}


def _change_places(owner: nn.Module, memory: Memory) -> Callable[[], None]:
    """Give the checkpoints of an earlier patch another level, and switch them on; return the function to undo this."""
    calls = layer_calls(owner)
    last = next((module for module, call in calls.items() if type(call) is LayerCall), None)
    places = _find_places(owner, memory, last)
    earlier = {call: call.place for call in calls.values()}
    for module, call in calls.items():
        call.set_place(places[module])
    undo_switches = _set_switches(calls, on=True)

    def undo() -> None:
        undo_switches()
        for call, place in earlier.items():
            call.set_place(place)

    return undo


# The names of the argument that holds the cache. The first one is used up to transformers 5.23, and the second one from
# 5.24 on, which also accepts the first one.
CACHE_NAMES = "past_key_values", "cache"


def _is_body(module: nn.Module) -> bool:
    """Return whether a module calls checkpointed layers, and creates their cache and their mask."""
    if not has_checkpoint_switch(module) or is_checkpoint_layer(module):
        return False
    names = {*inspect.signature(module.forward).parameters}
    return {"attention_mask", "position_ids"} <= names and not names.isdisjoint(CACHE_NAMES)


@dataclass(eq=False)
class CheckpointedBody:
    """Recipe for a body with checkpointed layers: it has no cache, but computes the same values as with a cache.
    transformers drops the cache of checkpointed layers. If a call has neither a cache nor a mask, transformers treats
    positions that begin again within a row as the start of another document, so the attention mask would depend on the
    memory level. If the stock model has a cache in such a call, this recipe passes a mask of ones."""

    names: tuple[str, ...]
    inner: Callable | None = None

    def __call__(self, body: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = checkpoint_function(body)
        if isinstance(call, LayerCall) and is_switched_on(body) and body.training and torch.is_grad_enabled():
            args, kwargs = self._without_cache(body, args, kwargs, call.place.memory)
        return (self.inner or type(body).forward)(body, *args, **kwargs)

    def _without_cache(self, body: Any, args: tuple, kwargs: dict[str, Any], memory: Memory) -> tuple[tuple, dict]:
        values = dict(zip(self.names, args, strict=False)) | kwargs
        get = values.get
        name = next((name for name in CACHE_NAMES if get(name) is not None), "")
        cache, use_cache = get(name), get("use_cache")
        if cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length() > 0:
            raise ValueError(
                f"tigon: memory='{memory}': {name} must hold no tokens in training with gradients, got "
                f"{cache.get_seq_length()} tokens, which checkpointed layers ignore; call the model in "
                "torch.no_grad(), or use memory='lean'"
            )
        has_cache = cache is not None or (getattr(body.config, "use_cache", False) if use_cache is None else use_cache)
        tokens = get("input_ids") if get("inputs_embeds") is None else get("inputs_embeds")
        if not has_cache or tokens is None or get("position_ids") is None or get("attention_mask") is not None:
            return args, kwargs
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        if "attention_mask" in self.names[: len(args)]:
            i = self.names.index("attention_mask")
            return (*args[:i], mask, *args[i + 1 :]), kwargs
        return args, kwargs | {"attention_mask": mask}


def _install_body(body: nn.Module) -> Callable[[], None]:
    """Install `CheckpointedBody` on a body, unless other code has replaced its forward."""
    names = [
        name
        for name, each in inspect.signature(body.forward).parameters.items()
        if each.kind <= each.POSITIONAL_OR_KEYWORD
    ]
    replacement = find_replacement(body)
    if replacement is None and foreign_forward(body):
        return lambda: None
    return install(body, CheckpointedBody(tuple(names), getattr(replacement, "recipe", None)))
