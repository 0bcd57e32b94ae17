"""The memory levels of `tigon.patch(model, memory=...)`. Each level decides how much a model saves for backward."""

import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tigon.hf.checkpoints import (
    decoder_layers,
    explain_no_checkpoint,
    explain_no_lean_block,
    is_eager,
    is_innermost,
    layer_calls,
    switch_off,
    switch_on,
    transformers_models,
)
from tigon.hf.layer_checkpoint import LayerCall, LayerCheckpoint
from tigon.hf.transformers_private import (
    SWITCH_SETTER,
    checkpoint_function,
    checkpoint_settings,
    has_switch_setter,
    is_checkpoint_layer,
    is_switched_on,
    set_switch,
    switch_state,
)
from tigon.memory.lean import lean, share_reachable_states
from tigon.memory.levels import MEMORY, Memory, parse_memory
from tigon.memory.repeating import ReachableStates
from tigon.recognition.replacement import exchange, find_recipe, find_replacement, foreign_forward, install
from tigon.runtime.compat.names import NAMES_FOR_LEAN, NAMES_FOR_OFFLOAD, require_names


def _find_obstacle(model: nn.Module, memory: Memory) -> str | None:
    """Return why a model cannot have a level; None if it can."""
    if memory.level == "checkpoint" and (reason := explain_no_checkpoint(model)) is not None:
        return reason
    if max((n or 0 for n in memory.counts.values()), default=0) > (count := len(decoder_layers(model))):
        return f"it has {count} layers"
    try:
        if memory.offload:
            require_names("copies to the host", *NAMES_FOR_LEAN, *NAMES_FOR_OFFLOAD)
    except RuntimeError as error:
        return str(error)
    if memory.level != "lean":
        return None
    return explain_no_lean_block() or (None if _lean_places(model) else foreign_forward(model))


def plan_level(model: nn.Module, memory: Memory) -> Callable[[], list[Callable[[], None]]]:
    """Return the function that applies a level to a model, in place of an earlier level, and returns its undoing. The
    default level leaves an earlier one in place."""
    if memory == Memory():
        return list
    if (reason := _find_obstacle(model, memory)) is not None:
        levels = {name: parse_memory(name) for name in MEMORY}
        possible_levels = ", ".join(repr(name) for name, x in levels.items() if x and _find_obstacle(model, x) is None)
        raise ValueError(
            f"patch: memory='{memory}' is not possible for this {type(model).__name__}: {reason}; "
            f"possible levels: {possible_levels}"
        )
    return functools.partial(_apply_level, model, memory)


def _apply_level(model: nn.Module, memory: Memory) -> list[Callable[[], None]]:
    """Apply a possible level to a model, in place of an earlier level; return the functions that undo this."""
    undo = [_watch_switches(model)]
    undo += switch_on(model, memory) if memory.level == "checkpoint" else [switch_off(model)]
    undo += _make_lean(model, memory)
    if memory.level == "lean":
        warn_of_useless_level(model, stacklevel=4)
    return undo


def describe_level(reference: Callable[[], nn.Module | None], requested: Memory) -> str | None:
    """Return the note of a report that says what the layers of a model save now. It is None for the default level
    without checkpoints, and for a deleted model. If another level than `requested` is in force, the note says so."""
    if (model := reference()) is None:
        return None
    installed = {module: call for module, call in layer_calls(model).items() if is_innermost(module)}
    calls = [call for module, call in installed.items() if is_switched_on(module)]
    level = calls[0].place.memory if calls else find_lean_level(model)
    texts = []
    if level is not None:
        off = len(installed) - len(calls) if calls else 0
        texts.append(f"{level}: {_describe_checkpoints(model, level, calls)}{f'; {off} layers are off' * bool(off)}")
    if others := _layers_checkpointed_by_others(model):
        consequence = f", so memory='{level}' has no effect in them" if level and level.level == "lean" else ""
        texts.append(f"transformers checkpoints {others} layers (gradient_checkpointing_enable){consequence}")
    if requested != Memory() and level != requested:
        reason = "" if level is None else ", because the level has changed"
        hint = "; gradient_checkpointing_enable() switches it on" if level is None and installed else ""
        texts.append(f"memory='{requested}' of this patch is off{reason}{hint}")
    return "; ".join(texts) or None


def _layers_checkpointed_by_others(model: nn.Module) -> int:
    """Return the number of layers that are checkpointed, but not by a level."""
    layers = [module for module in model.modules() if is_checkpoint_layer(module) and is_switched_on(module)]
    return len(layers) - sum(isinstance(checkpoint_function(layer), LayerCall) for layer in layers)


def _describe_checkpoints(model: nn.Module, memory: Memory, calls: list[LayerCall]) -> str:
    """Return the note of a level. `calls` are the functions that call the checkpointed layers of the model."""
    note = memory.describe(excludes_last=any(type(call) is LayerCall for call in calls))
    if memory.attention and all(map(is_eager, transformers_models(model))):
        note += (
            "; no kernel computes the attention of this model, because it is eager, so backward runs all of it again"
        )
    judgements = [call.judgement for call in calls if isinstance(call, LayerCheckpoint) and call.judgement is not None]
    if reasons := [judgement.reason for judgement in judgements if judgement.reason is not None]:
        note += f"; {len(reasons)} layers run once, because a second run might differ: {reasons[0]}"
    return note


@dataclass(eq=False)
class LeanForward:
    """Recipe that runs the forward of the module's class, or another recipe, in a block of `lean`. If a later patch has
    set a level without `lean`, the forward runs without this block."""

    inner: Callable | None
    # The level, and whether this block also recomputes the gate and up projections. A level may do so in some blocks.
    setting: tuple[Memory, bool]
    # The snapshots of the state that projections read. They are freed with the model.
    reachable_states: ReachableStates = field(default_factory=weakref.WeakKeyDictionary, repr=False)

    def __reduce__(self) -> tuple:
        return LeanForward, (self.inner, self.setting)

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function, (memory, mlp) = self.inner or type(model).forward, self.setting
        if memory.level != "lean":
            return function(model, *args, **kwargs)
        with lean(mlp=mlp):
            if mlp:
                share_reachable_states(self.reachable_states)
            return function(model, *args, **kwargs)


def _lean_places(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward runs in a block of `lean`: the model, and the bodies of language models in it.
    Trainers replace the forward of a language model by one that calls its body, as TRL does. A call of the model enters
    one block, because a block inside another block only adds its options."""
    bodies = [getattr(owner, "base_model", None) for owner in transformers_models(model)]
    places = [model, *(body for body in bodies if isinstance(body, nn.Module) and body is not model)]
    return [place for place in places if find_replacement(place) or not foreign_forward(place)]


def _make_lean(model: nn.Module, memory: Memory) -> list[Callable[[], None]]:
    """Let the model and its bodies run in `lean`. A level without `lean` switches off the blocks of an earlier patch.
    Return the functions that undo this."""
    is_lean, in_all = memory.level == "lean", memory.mlp is True
    undo = [_make_place_lean(place, memory, in_all) for place in _lean_places(model) if is_lean or _has_block(place)]
    # The block of a layer adds its options to the block of the model. The first layers are chosen, because backward
    # reaches them last, when the memory of the others is free again.
    for i, layer in enumerate(decoder_layers(model)):
        has_option = not in_all and i < memory.mlp
        if has_option or _has_block(layer):
            undo.append(_make_place_lean(layer, memory, in_all or has_option))
    return undo


def _has_block(module: nn.Module) -> bool:
    """Return whether an earlier patch has installed a block in a module."""
    return find_recipe(module, LeanForward) is not None


def _make_place_lean(module: nn.Module, memory: Memory, mlp: bool) -> Callable[[], None]:
    installed = find_recipe(module, LeanForward)
    if installed is not None:
        return exchange(installed, "setting", (memory, mlp))
    return install(module, LeanForward(getattr(find_replacement(module), "recipe", None), (memory, mlp)))


def find_lean_level(model: nn.Module) -> Memory | None:
    """Return the level with `lean` that a model, or a module in it, has; None if it has no such level."""
    recipes = (find_recipe(module, LeanForward) for module in model.modules())
    levels = (recipe.setting[0] for recipe in recipes if recipe is not None)
    return next((memory for memory in levels if memory.level == "lean"), None)


def warn_of_useless_level(model: nn.Module, stacklevel: int) -> None:
    """Warn if other code checkpoints the layers of a model whose level uses `lean`."""
    memory, count = find_lean_level(model), _layers_checkpointed_by_others(model)
    if memory is not None and count:
        warnings.warn(
            f"tigon: {count} layers of {type(model).__name__} are checkpointed (by gradient_checkpointing_enable, "
            "which trainers with gradient_checkpointing=True and peft.prepare_model_for_kbit_training call), so "
            f"memory='{memory}' has no effect in them; pass gradient_checkpointing=False, or call "
            "model.gradient_checkpointing_disable(). With TRL, "
            f"tigon.integrations.trl.enable(memory='{memory}') switches checkpointing off",
            stacklevel=stacklevel,
        )


class LevelSwitch:
    """Replaces the method by which transformers sets the switches of a model, for a model with a memory level. It
    switches the checkpoints of the level on or off. At a level with `lean`, transformers checkpoints the layers
    instead, and a warning says that the level has no effect in them."""

    def __init__(self, model: nn.Module | None) -> None:
        # The reference is weak, so that a deleted model frees its memory at once.
        self.model: Callable[[], nn.Module | None] = (lambda: None) if model is None else weakref.ref(model)

    def __reduce__(self) -> tuple:
        return LevelSwitch, (self.model(),)

    def __call__(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Set the switches of all modules in the model, as the method of its class does."""
        if (model := self.model()) is None:
            raise ReferenceError(
                "tigon: this model is a shallow copy (copy.copy) of a model that was deleted; use copy.deepcopy"
            )
        calls = layer_calls(model)
        getattr(type(model), SWITCH_SETTER)(model, enable, *args, **kwargs)
        for module, call in calls.items():
            call.stock_state = switch_state(module)
            set_switch(module, call, enable)
        if not enable:
            return
        settings = ", ".join(f"{name}={value!r}" for name, value in checkpoint_settings(*args, **kwargs).items())
        if calls and settings:
            memory = next(iter(calls.values())).place.memory
            warnings.warn(
                f"tigon: the memory level '{memory}' checkpoints the layers and ignores these settings: {settings}",
                stacklevel=3,
            )
        elif not calls:
            warn_of_useless_level(model, stacklevel=4)


def _watch_switches(model: nn.Module) -> Callable[[], None]:
    """Let the models in a module keep their level when checkpointing is switched; return the function to undo this."""
    models = [module for owner in transformers_models(model) for module in owner.modules() if has_switch_setter(module)]
    for each in models:
        # A model and a copy of it by `copy.copy` have the same attributes.
        if getattr(vars(each).get(SWITCH_SETTER), "model", lambda: None)() is not each:
            vars(each)[SWITCH_SETTER] = LevelSwitch(each)

    def undo() -> None:
        for each in models:
            # A later patch may have given the model another level.
            if not layer_calls(each) and find_lean_level(each) is None:
                vars(each).pop(SWITCH_SETTER, None)

    return undo
