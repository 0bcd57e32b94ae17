"""The memory levels of `tigon.patch(model, memory=...)`. Each level decides how much a model saves for backward."""

import functools
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tigon.hf.transformers_private import (
    attention_of,
    checkpoint_function,
    checkpoint_refusal,
    has_checkpoint_switch,
    is_checkpoint_layer,
    is_switched_on,
    pop_input_hooks,
    restore_input_hooks,
    restore_switch,
    set_checkpoint_function,
    switch_state,
)
from tigon.memory.attention import AttentionOutputs, LayerAttention, attention_contexts_in_graph
from tigon.memory.layer_inputs import LayerInputs
from tigon.memory.layers import LayerJudgement
from tigon.memory.lean import lean, recompute_large_mlps
from tigon.recognition.replacement import exchange, find_replacement, foreign_forward, install
from tigon.runtime.torch_private.names import NAMES_FOR_LEAN, NAMES_FOR_OFFLOAD, require_names

__all__ = ["LEVELS", "LEVEL_NAMES", "LeanForward", "apply_level", "explain_refusal", "find_lean_forward", "find_level"]


@dataclass(frozen=True)
class Level:
    """A memory level: the model's forward runs in a block of `lean` with these options, or its layers are checkpointed.

    A level without any option changes nothing.
    """

    # The text that the report shows.
    note: str = ""
    lean: bool = False
    mlp: bool = False
    offload: bool = False
    checkpoint: bool = False
    attention: bool = False
    # The number of layers, from the first one on, that `mlp` applies to, or whose inputs move to the host. None means
    # all layers for `mlp`, and all but those whose inputs need not move for the inputs.
    layers: int | None = None
    # The number of checkpointed layers, up to the last one, that `attention` applies to. None means all.
    attention_layers: int | None = None


LEVELS = {
    "default": Level(),
    "lean": Level("lean: backward recomputes the outputs of norms and gates", lean=True),
    "lean+mlp": Level(
        "lean+mlp: backward recomputes the outputs of norms and gates, and of the gate and up projections of MLPs and "
        "experts",
        lean=True,
        mlp=True,
    ),
    "checkpoint": Level("checkpoint: layers{} save only their input, and backward runs them again", checkpoint=True),
    "checkpoint+attention": Level(
        "checkpoint+attention: layers{} save only their input and{} the outputs of attention, and backward runs the "
        "rest of them again",
        checkpoint=True,
        attention=True,
    ),
    "checkpoint+offload": Level(
        "checkpoint+offload: layers{} save only their input, which is copied to pinned host memory until backward runs "
        "them again",
        checkpoint=True,
        offload=True,
    ),
    "checkpoint+attention+offload": Level(
        "checkpoint+attention+offload: layers{} save only their input and{} the outputs of attention, which are copied "
        "to pinned host memory until backward runs the rest of them again",
        checkpoint=True,
        attention=True,
        offload=True,
    ),
    "offload": Level(
        "offload: like lean+mlp, and the remaining saved tensors are copied to pinned host memory until backward",
        lean=True,
        mlp=True,
        offload=True,
    ),
}


# A number after `mlp` or `offload` says to how many layers the word applies, from the first layer on. A number after
# `attention` says it of the last layers. The other layers have the level without this word.
_PARTIAL = re.compile(r"lean\+mlp:([1-9][0-9]*)|checkpoint(\+attention(:[1-9][0-9]*)?)?(\+offload(:[1-9][0-9]*)?)?")
LEVEL_NAMES = (
    ", ".join(map(repr, LEVELS))
    + ", and 'lean+mlp:N', 'checkpoint+attention:N', 'checkpoint+offload:N' and 'checkpoint+attention:N+offload:N' for "
    "numbers N of layers"
)


def find_level(name: object) -> Level | None:
    """Return the level with this name; None if there is none."""
    if not isinstance(name, str):
        return None
    if name in LEVELS or (match := _PARTIAL.fullmatch(name)) is None:
        return LEVELS.get(name)
    base = LEVELS[re.sub(":[0-9]+", "", name)]
    if match[1] is not None:
        note = (
            f"{name}: lean, and in the first {match[1]} layers also without the outputs of gate and up projections of "
            "MLPs and experts"
        )
        return replace(base, note=note, layers=int(match[1]))
    attention_layers, layers = (int(number[1:]) if number else None for number in (match[3], match[5]))
    note = f"{name}:{base.note.partition(':')[2]}"
    if layers is not None:
        note = re.sub("which (is|are)", rf"which in the first {layers} layers \1", note)
    return replace(base, note=note, layers=layers, attention_layers=attention_layers)


def _level(name: str) -> Level:
    level = find_level(name)
    assert level is not None
    return level


@dataclass(eq=False)
class LeanForward:
    """Recipe that runs the forward of the module's class, or another recipe, in a block of `lean`."""

    inner: Callable | None = None
    mlp: bool = False
    offload: bool = False

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with lean(mlp=self.mlp, offload=self.offload):
            return (self.inner or type(model).forward)(model, *args, **kwargs)


def _find_obstacle(model: nn.Module, level: str) -> str | None:
    """Return why a model cannot have a level; None if it can."""
    options = _level(level)
    if options.checkpoint and (reason := _explain_no_checkpoint(model, options)) is not None:
        return reason
    if max(options.layers or 0, options.attention_layers or 0) > (count := len(_layers(model))):
        return f"it has {count} layers"
    if options.offload and (reason := _explain_no_offload()) is not None:
        return reason
    return _explain_no_lean(model) if options.lean else None


def _explain_no_offload() -> str | None:
    """Return why tensors cannot move to the host with this torch; None if they can."""
    try:
        require_names("copies to the host", *NAMES_FOR_LEAN, *NAMES_FOR_OFFLOAD)
    except RuntimeError as error:
        return str(error)
    return None


def explain_refusal(model: nn.Module, level: str) -> str | None:
    """Return why a model cannot have a level, and which levels it can have; None if it can have this one."""
    if (reason := _find_obstacle(model, level)) is None:
        return None
    possible_levels = ", ".join(repr(name) for name in LEVELS if _find_obstacle(model, name) is None)
    return f"{reason}; possible levels: {possible_levels}"


def apply_level(model: nn.Module, level: str) -> tuple[Callable[[], None], str]:
    """Apply a level that is possible for this model; return the function that undoes it, and a note for the report."""
    options = _level(level)
    if not options.checkpoint:
        return _make_lean(model, options), options.note
    undo, excludes_last, reasons = _switch_on(model, options)
    number = options.attention_layers
    in_layers = "" if number is None else f", in {number} of them,"
    note = options.note.format(" except the last" if excludes_last else "", in_layers)
    if options.attention and all(map(_is_eager, _transformers_models(model))):
        note += (
            "; no kernel computes the attention of this model, because it is eager, so backward runs all of it again"
        )
    if reasons:
        note += f"; {len(reasons)} layers run once, because a second run might differ: {reasons[0]}"
    return undo, note


# --- blocks of lean --------------------------------------------------------------------------------


def _try_lean() -> str | None:
    """Enter a block of `lean`. Return the message of the error that it raises; None if it raises none."""
    try:
        with lean():
            return None
    # torch raises this error where saved-tensor hooks are forbidden.
    except RuntimeError as error:
        return str(error)


def _lean_places(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward runs in a block of `lean`: the model, and the bodies of language models in it.

    Trainers replace the forward of a language model by one that calls its body, as TRL does. A call of the model enters
    one block, because a block inside another block only adds its options.
    """
    bodies = [getattr(owner, "base_model", None) for owner in _transformers_models(model)]
    places = [model, *(body for body in bodies if isinstance(body, nn.Module) and body is not model)]
    return [place for place in places if find_replacement(place) or not foreign_forward(place)]


def _explain_no_lean(model: nn.Module) -> str | None:
    """Return why neither the model nor its body can run in a block of `lean`; None if one of them can."""
    return _try_lean() or (None if _lean_places(model) else foreign_forward(model))


def _make_lean(model: nn.Module, level: Level) -> Callable[[], None]:
    """Let the forwards of the model and its bodies, which may be replacements already, run in a block of `lean`."""
    lean_level = LEVELS["lean"]
    undo = [_make_place_lean(place, level if level.layers is None else lean_level) for place in _lean_places(model)]
    # The block of a layer adds its options to the block of the model. The first layers are chosen, because backward
    # reaches them last, when the memory of the others is free again.
    for i, layer in enumerate(_layers(model)):
        has_option = level.layers is not None and i < level.layers
        # An earlier level may have installed a block in this layer.
        if has_option or isinstance(getattr(find_replacement(layer), "recipe", None), LeanForward):
            undo.append(_make_place_lean(layer, level if has_option else lean_level))

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _decoder(model: Any) -> nn.Module:
    """Return the decoder of a model, without encoders and vision towers; the model itself if it names none."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the stack with the most parameters in the decoder, or in the model if that has no stack."""
    for place in (_decoder(model), model):
        stacks = [[*module] for module in place.modules() if isinstance(module, nn.ModuleList) and len(module)]
        if stacks := [stack for stack in stacks if all(map(is_checkpoint_layer, stack))]:
            # The parameters of all stacks may be empty if an engine shards them.
            return max(stacks, key=lambda stack: (sum(p.numel() for m in stack for p in m.parameters()), len(stack)))
    return []


def _make_place_lean(module: nn.Module, level: Level) -> Callable[[], None]:
    replacement = find_replacement(module)
    if replacement is None:
        return install(module, LeanForward(None, level.mlp, level.offload))
    installed = _find_lean_recipe(replacement.recipe)
    if installed is None:
        return exchange(replacement, LeanForward(replacement.recipe, level.mlp, level.offload))
    earlier_options, options = (installed.mlp, installed.offload), (level.mlp, level.offload)
    installed.mlp, installed.offload = options

    def undo() -> None:
        if (installed.mlp, installed.offload) == options:
            installed.mlp, installed.offload = earlier_options

    return undo


def _find_lean_recipe(recipe: Any) -> LeanForward | None:
    """Return the recipe of a lean level among a recipe and those that it runs; None if there is none."""
    while recipe is not None and not isinstance(recipe, LeanForward):
        recipe = getattr(recipe, "inner", None)
    return recipe


def find_lean_forward(model: nn.Module) -> LeanForward | None:
    """Return the recipe of a lean level that is installed on a model or a module in it; None if there is none."""
    replacements = (find_replacement(module) for module in model.modules())
    recipes = (_find_lean_recipe(replacement.recipe) for replacement in replacements if replacement is not None)
    return next((recipe for recipe in recipes if recipe is not None), None)


# --- checkpointing ---------------------------------------------------------------------------------

# A head is large if the ratio of its parameters to those of a layer exceeds this number. According to `tigon plan`, the
# peak memory of a step changes by -2 % to +2 % if the last layer runs once and the ratio is at most 5 (Llama-3-8B,
# Llama-3.2-1B, Qwen3-4B), and by +2 % to +14 % if the ratio is at least 8.
LARGE_HEAD = 5

_NOT_COMPILED = (
    "memory='checkpoint+offload' does not work in a compiled model, because a graph saves its tensors itself; compile "
    "only the layers, or use memory='checkpoint'"
)


def _transformers_models(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost transformers models in a module. The module may itself be one of them, or contain them."""
    if hasattr(type(module), "gradient_checkpointing_enable"):
        yield module
    else:
        for child in module.children():
            yield from _transformers_models(child)


def _explain_no_checkpoint(model: nn.Module, options: Level) -> str | None:
    """Return why the model cannot be checkpointed by its own switch; None if it can."""
    owners = list(_transformers_models(model))
    if not owners:
        return (
            "it is not a transformers model, so its layers have no switch for gradient checkpointing; "
            "call them through torch.utils.checkpoint yourself"
        )
    if (options.offload or options.attention) and any(
        is_switched_on(m) and not _layer_calls(m) for owner in owners for m in owner.modules()
    ):
        return "its layers are checkpointed by other code; switch that off first (gradient_checkpointing_disable)"
    return next((reason for owner in owners if (reason := checkpoint_refusal(owner)) is not None), None)


def _last_layer(owner: Any) -> nn.Module | None:
    """Return the last layer if it should run only once and save its activations for backward; None otherwise.

    The model, or its decoder, must have exactly one stack of layers. The backward of the last layer comes first, so
    recomputing it would take the same memory a moment later, after the head and its loss. The head and its loss take
    less memory than the backward of a layer, unless the vocabulary is large and the layers are small.
    """
    if _try_lean():
        return None
    stacks = [m for m in _decoder(owner).modules() if isinstance(m, nn.ModuleList) and any(map(is_checkpoint_layer, m))]
    if len(stacks) != 1 or not all(map(is_checkpoint_layer, stacks[0])):
        return None
    last, head = stacks[0][-1], getattr(owner.get_output_embeddings(), "weight", None)
    size = sum(p.numel() for p in last.parameters())
    return last if head is None or head.numel() <= LARGE_HEAD * size else None


class StackPlace(NamedTuple):
    """The place of a layer in a stack, and what the layers of the stack share."""

    # The number of the layer.
    number: int = 0
    # The object that moves the inputs of the layers to the host. It is None if they stay on the device.
    inputs: LayerInputs | None = None
    # The object that says which layers save the outputs of attention. It is None if no layer does.
    attention: LayerAttention | None = None


class LayerCall:
    """A function that calls a layer once, in a block of `lean`, in place of the one that checkpoints the layer.

    `place` is the place of the layer in its stack.
    """

    def __init__(self, layer: nn.Module | None, place: "StackPlace | None" = None) -> None:
        # The reference is weak, so that a deleted model frees its memory at once.
        self.layer: Callable[[], nn.Module | None] = (lambda: None) if layer is None else weakref.ref(layer)
        self.set_place(place or StackPlace())

    def __reduce__(self) -> tuple:
        return type(self), (self.layer(), self.place)

    @property
    def inputs(self) -> LayerInputs | None:
        """The object that moves the inputs of the stack to the host; None if they stay on the device."""
        return self.place.inputs

    def set_place(self, place: "StackPlace") -> None:
        """Set the place of the layer in its stack, and add the layer to the object that moves its input."""
        self.place = place
        if place.inputs is not None and (layer := self.layer()) is not None:
            place.inputs.layers[place.number] = layer

    def __call__(self, function: Callable, *args: Any) -> Any:
        """Call the layer once."""
        if self.inputs is not None:
            self.inputs.leave_layer(self.place.number)
        if torch.compiler.is_compiling():
            with lean():
                return function(*args)
        # Checkpointed layers recompute gate and up of large MLPs in tiles. If this layer saved them, it would need
        # more memory than those.
        with lean(), recompute_large_mlps():
            return function(*args)


class LayerCheckpoint(LayerCall):
    """A function that checkpoints a layer, or calls it once if a second run might differ.

    It takes the place of the function that the layer's switch calls. The layer may change after the patch, so each call
    compares the state that the judgement depends on.
    """

    def __init__(self, layer: nn.Module | None, place: "StackPlace | None" = None) -> None:
        super().__init__(layer, place)
        # A copied layer is judged at its first call, because it is incomplete before that.
        self.judgement: LayerJudgement | None = None

    def __call__(self, function: Callable, *args: Any) -> Any:
        """Checkpoint the layer, or call it once.

        Raises:
            RuntimeError: The host has too little memory for the inputs of the layers.
        """
        if torch.compiler.is_compiling():
            if self.inputs is not None:
                raise RuntimeError(_NOT_COMPILED)
            may_repeat = self._may_repeat_in_graph()
        elif may_repeat := self._may_repeat():
            layer, judgement = self.layer(), self.judgement
            assert layer is not None
            assert judgement is not None
            function = judgement.wrap_for_checkpoint(function, layer)
        if not may_repeat:
            return super().__call__(function, *args)
        number, inputs, attention = self.place
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


def _is_innermost(module: nn.Module) -> bool:
    """Return whether a module has the switch for checkpointing, and no module inside it has one."""
    return has_checkpoint_switch(module) and sum(map(has_checkpoint_switch, module.modules())) == 1


def _switch_on(model: nn.Module, options: Level) -> tuple[Callable[[], None], bool, list[str]]:
    """Switch on the model's own checkpointing, without reentrant backward.

    A model that is checkpointed already stays unchanged.

    Returns:
        The function that undoes this; True if the last layer is not checkpointed; the reasons why other layers are not
        checkpointed.
    """
    undo: list[Callable[[], None]] = []
    reasons: list[str] = []
    for owner in _transformers_models(model):
        if any(map(is_switched_on, owner.modules())):
            undo.append(_change_places(owner, options))
            continue
        states = [(m, switch_state(m)) for m in owner.modules() if has_checkpoint_switch(m)]
        handles = pop_input_hooks(owner)
        owner.gradient_checkpointing_enable({"use_reentrant": False})
        # Non-reentrant checkpoints need no gradients of layer inputs, so the hooks that require these are removed.
        restore_input_hooks(owner, handles)
        last = _last_layer(owner)
        places = _find_places(owner, options, last)
        checkpoints = {m: LayerCheckpoint(m, places[m]) for m, _ in states}
        for module, layer_checkpoint in checkpoints.items():
            set_checkpoint_function(module, layer_checkpoint)
        if last is not None:
            set_checkpoint_function(last, LayerCall(last, places[last]))
        for layer in (m for m in owner.modules() if _is_innermost(m)):
            if layer is not last and (reason := checkpoints[layer].judge()) is not None:
                reasons.append(reason)
        undo += [functools.partial(_restore_switch, m, state, checkpoint_function(m)) for m, state in states]
    modules = itertools.chain.from_iterable(owner.modules() for owner in _transformers_models(model))
    excludes_last = any(type(checkpoint_function(m)) is LayerCall for m in modules)

    def switch_off() -> None:
        for step in undo:
            step()

    return switch_off, excludes_last, reasons


def _is_eager(owner: Any) -> bool:
    """Return whether the decoder of a model computes attention by single operators, and not by a kernel."""
    return attention_of(_decoder(owner)) == "eager"


def _find_places(owner: nn.Module, options: Level, last: nn.Module | None) -> dict[nn.Module, StackPlace]:
    """Return the place of each module of a model in the stack whose inputs move, or whose attention is saved.

    `last` is the layer that is not checkpointed, if there is one. Layers outside of the stack save the outputs of
    attention if the level has no number of layers.
    """
    layers = _layers(owner)
    checkpointed = len(layers) - (last in layers)
    inputs = LayerInputs(options.layers, checkpointed, options.attention) if options.offload else None
    attention = None
    if options.attention:
        # The report has a line about eager attention, so no warning follows.
        attention = LayerAttention(options.attention_layers, checkpointed, warns=not _is_eager(owner))
    others = LayerAttention() if options.attention and options.attention_layers is None else None
    places = {module: StackPlace(attention=others) for module in owner.modules()}
    return places | {module: StackPlace(i, inputs, attention) for i, module in enumerate(layers)}


def _layer_calls(model: nn.Module) -> dict[nn.Module, LayerCall]:
    """Return the functions of this file that call a layer in a model."""
    functions = {module: checkpoint_function(module) for module in model.modules()}
    return {module: function for module, function in functions.items() if isinstance(function, LayerCall)}


def _change_places(owner: nn.Module, options: Level) -> Callable[[], None]:
    """Change what the layers that an earlier patch checkpoints save, and where.

    Layers that other code checkpoints stay unchanged.
    """
    calls = _layer_calls(owner)
    last = next((module for module, call in calls.items() if type(call) is LayerCall), None)
    places = _find_places(owner, options, last)
    earlier = {call: call.place for call in calls.values()}
    for module, call in calls.items():
        call.set_place(places[module])

    def undo() -> None:
        for call, place in earlier.items():
            call.set_place(place)

    return undo


def _restore_switch(module: nn.Module, state: dict[str, Any], installed_function: Callable | None) -> None:
    """Restore the switch of a module, unless other code has changed it since the patch."""
    if checkpoint_function(module) is installed_function:
        restore_switch(module, state)
