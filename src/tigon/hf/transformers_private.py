"""Every private or undocumented name of transformers that Tigon needs, in one place.

Each function states which name it uses, why, and what happens without it. All names exist in transformers 5.13 to 5.24,
and `tests/hf/test_transformers_private.py` tests them, also those that `tigon.recognition.parts.experts` reads: the
marks of experts and the setting `_experts_implementation`. transformers is imported when a function is called.
"""

import contextlib
import inspect
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LOGGER = logging.getLogger("tigon")


def _missing(name: str) -> RuntimeError:
    """Return the error for a name that the installed transformers does not have."""
    import transformers

    return RuntimeError(
        f"transformers {transformers.__version__} has no {name}, which Tigon needs here; "
        "docs/compatibility.md lists the versions that work"
    )


def _uses(cls: type, method: str, name: str) -> bool:
    """Return whether a method, as a class or one of its bases defines it, uses an attribute of this name."""
    functions = (inspect.unwrap(vars(base)[method]) for base in cls.__mro__ if method in vars(base))
    codes = (f.__code__ for f in functions if isinstance(f, types.FunctionType))
    return any(name in (*code.co_names, *code.co_consts) for code in codes)


# --- the loss --------------------------------------------------------------------------------------


def is_code_of_base_class(cls: type) -> bool:
    """Return whether a class is a base class that all models of transformers share. Such a class is defined in the
    module `transformers.modeling_utils`. The numbers that its methods read are not settings of one model. If the module
    has another name, these numbers count as settings of the model, and the loss is stock after more changes than
    necessary."""
    return cls.__module__ == "transformers.modeling_utils"


def loss_slot(model: nn.Module) -> str | None:
    """Return the attribute of a model that holds the function assigned to `model.loss_function`. In `PreTrainedModel`,
    `loss_function` is a property. It stores an assigned function in `_loss_function`, and chooses one by `loss_type` if
    none was assigned. An assignment to an empty object shows the name of the slot. The result is None, and the loss of
    the model stays stock, if the slot is not found or if the model has no `loss_type`: the choice then depends on
    something that Tigon does not know."""
    attribute = getattr(type(model), "loss_function", None)
    if not isinstance(attribute, property):
        return "loss_function"
    probe, marker = types.SimpleNamespace(), object()
    try:
        attribute.__set__(probe, marker)
    except Exception:
        LOGGER.debug("The loss function of %s cannot be assigned to.", type(model).__name__, exc_info=True)
        return None
    slot = next((name for name, value in vars(probe).items() if value is marker), None)
    is_stock = str(getattr(attribute.fget, "__module__", "")).startswith("transformers.")
    return slot if hasattr(model, "loss_type") or not is_stock else None


def loss_type(model: nn.Module) -> str | None:
    """Return the name of a model's loss in the table of transformers. `loss_slot` refuses a model without it."""
    return getattr(model, "loss_type", None)


# --- masks -----------------------------------------------------------------------------------------


# The functions that decide whether a mask is built, by their files, and their results for one sample without a mask.
_READERS: dict[str, dict[str, Any]] = {
    "transformers.masking_utils": {"is_tracing": False, "find_packed_sequence_indices": None},
    "transformers.modeling_flash_attention_utils": {"_is_packed_sequence": False},
}


@contextlib.contextmanager
def masks_as_in_eager_calls() -> Iterator[None]:
    """Let a call without a mask, whose samples are not packed, build no causal mask while a CUDA graph is captured.
    Attention would read the mask, and its kernels with a mask are slower. transformers builds one because it cannot
    read the values of tensors during a capture, and such a call has none to read. If `is_tracing` were not replaced,
    the graph would have the mask. The same is true of `find_packed_sequence_indices` for a call with positions. If
    `_is_packed_sequence` were not replaced, a call of one row by flash-attn could not be captured, because the host
    reads its positions."""
    thread = threading.get_ident()

    def replace(function: Callable, result: Any) -> Callable:
        # Models of other threads may have packed batches.
        return lambda *args, **kwargs: result if threading.get_ident() == thread else function(*args, **kwargs)

    tables = {file: vars(sys.modules[file]) for file in _READERS if file in sys.modules}
    stock = {file: {name: table[name] for name in _READERS[file] if name in table} for file, table in tables.items()}
    for file, functions in stock.items():
        tables[file].update({name: replace(f, _READERS[file][name]) for name, f in functions.items()})
    try:
        yield
    finally:
        for file, functions in stock.items():
            tables[file].update(functions)


# --- checkpointing ---------------------------------------------------------------------------------

# A model or layer that can be checkpointed has the first attribute, which is True while checkpointing is switched on.
# The second attribute is the function that calls the layer.
_SWITCH = "gradient_checkpointing", "_gradient_checkpointing_func"
# The method that sets both attributes of all modules in a model.
SWITCH_SETTER = "_set_gradient_checkpointing"


@dataclass(frozen=True)
class OnWithGradients:
    """A value for a switch. It is true while gradients are computed, and false in `torch.no_grad()`. Without gradients
    there is nothing to recompute, and a layer that is not checkpointed can use its cache."""

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


def checkpoint_refusal(model: nn.Module) -> str | None:
    """Return why the functions below cannot set the checkpointing of a model; None if they can."""
    name = type(model).__name__
    if not getattr(model, "supports_gradient_checkpointing", False):
        return f"{name} does not support gradient checkpointing (supports_gradient_checkpointing is False)"
    if not any(map(has_checkpoint_switch, model.modules())):
        return f"no layer of {name} has the switch {_SWITCH[0]}"
    if not hasattr(model, SWITCH_SETTER):
        return str(_missing(f"PreTrainedModel.{SWITCH_SETTER}"))
    if not has_switch_setter(model):
        return f"the method {SWITCH_SETTER} of {name} takes no function for checkpointing"
    # Without the second name, a layer would be checkpointed even if a second run of it might differ.
    if not _uses(type(model), SWITCH_SETTER, _SWITCH[1]):
        return str(_missing(f"{_SWITCH[1]} in PreTrainedModel.{SWITCH_SETTER}"))
    return None


def has_checkpoint_switch(module: nn.Module) -> bool:
    """Return whether a module can be checkpointed by itself."""
    return hasattr(module, _SWITCH[0])


def is_switched_on(module: nn.Module) -> bool:
    """Return whether a module is checkpointed while gradients are computed."""
    value = getattr(module, _SWITCH[0], False)
    return isinstance(value, OnWithGradients) or bool(value)


def checkpoint_function(module: nn.Module) -> Callable | None:
    """Return the function that calls a checkpointed module; None if it has none."""
    return getattr(module, _SWITCH[1], None)


def set_switch(module: nn.Module, function: Callable, on: bool) -> None:
    """Let a function call the module while gradients are computed. If `on` is False, the module is called directly."""
    setattr(module, _SWITCH[0], OnWithGradients() if on else False)
    setattr(module, _SWITCH[1], function)


def switch_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the switch that are set on the module itself, not only on its class."""
    return {name: vars(module)[name] for name in _SWITCH if name in vars(module)}


def restore_switch(module: nn.Module, state: dict[str, Any]) -> None:
    """Restore the switch of a module to what `switch_state` returned."""
    for name in _SWITCH:
        vars(module).pop(name, None)
    vars(module).update(state)


def has_switch_setter(model: nn.Module) -> bool:
    """Return whether the class of a model has the method that sets the switches of its modules. Without it, a memory
    level is lost when `gradient_checkpointing_enable` is called; the report says so. The method has another signature
    in old code of models on the hub."""
    setter = getattr(type(model), SWITCH_SETTER, None)
    return setter is not None and "value" not in inspect.signature(setter).parameters


def checkpoint_settings(
    gradient_checkpointing_func: Callable | None = None, every_n_layers: int = 1, **others: Any
) -> dict[str, Any]:
    """Return the arguments of a call of `gradient_checkpointing_enable` that a memory level ignores, by name. The
    arguments are those that `gradient_checkpointing_enable` passes to the method that sets the switches, without the
    first one. `gradient_checkpointing_func` is a `functools.partial` of `torch.utils.checkpoint.checkpoint` with the
    keywords of the user."""
    settings = dict(getattr(gradient_checkpointing_func, "keywords", {}))
    if settings.get("use_reentrant") is False:
        del settings["use_reentrant"]
    function = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
    # The function of `offload=True` is local to a method, whose name differs between versions.
    if getattr(function, "__qualname__", "").startswith("PreTrainedModel."):
        settings["offload"] = True
    elif function is not None and function is not checkpoint:
        settings["gradient_checkpointing_func"] = function
    return settings | ({} if every_n_layers == 1 else {"every_n_layers": every_n_layers}) | others


def is_checkpoint_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of a stack that transformers checkpoints layer by layer. Such a layer has a
    base class with the name `GradientCheckpointingLayer`. Without this name, the last layer of a model is checkpointed
    like all other layers, which takes more time."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


# --- packed sequences ------------------------------------------------------------------------------


def builds_mask(function: Any) -> bool:
    """Return True for a function of transformers that builds an attention mask and has an optional `position_ids`. Such
    a function is in `masking_utils`. It infers from `position_ids` whether a batch is packed, for which the host waits
    for the device. If transformers has no such module, the result is always False, and the host waits."""
    if not isinstance(function, types.FunctionType) or function.__module__ != "transformers.masking_utils":
        return False
    parameter = inspect.signature(function).parameters.get("position_ids")
    return parameter is not None and parameter.default is None


# --- classes and types of models -------------------------------------------------------------------


def constructors() -> tuple[str, ...]:
    """Return the names of the methods that build a model. `AutoModelForCausalLM.from_config` calls `_from_config`,
    which sets the dtype while it builds. Without this name, `tigon.patch("llama")` refuses, because a model would be
    patched before it is complete."""
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "_from_config"):
        raise _missing("PreTrainedModel._from_config")
    return "__init__", "from_pretrained", "_from_config"


def model_mappings() -> list[Mapping[type, Any]]:
    """Return all tables of transformers that map a config class to the classes of models that are built from it. They
    are in the undocumented module `transformers.models.auto.modeling_auto`."""
    try:
        from transformers.models.auto import modeling_auto

        mapping_class = type(modeling_auto.MODEL_MAPPING)
    except (ImportError, AttributeError) as error:
        raise _missing("models.auto.modeling_auto.MODEL_MAPPING") from error
    return [value for value in vars(modeling_auto).values() if isinstance(value, mapping_class)]


def auto_class_has(auto_class: str, config: type) -> bool:
    """Return whether an auto class, such as "AutoModelForCausalLM", builds a model from a config of this class."""
    import transformers

    mapping = getattr(getattr(transformers, auto_class), "_model_mapping", None)
    if mapping is None:
        raise _missing(f"{auto_class}._model_mapping")
    return config in mapping


def attention_of(model: Any) -> str:
    """Return the name of a model's attention, such as "sdpa". The config has it as `_attn_implementation`. Without this
    name, the result is "unknown": reports print the name, and nothing depends on it."""
    return getattr(model.config, "_attn_implementation", None) or "unknown"


class ModelFacts(NamedTuple):
    """The facts that transformers states about the layers of a model."""

    layer_classes: set[str]
    layer_types: tuple[str, ...]
    # This is True if the attribute `_is_stateful` says that the layers have a state.
    is_stateful: bool
    # The patterns that match the weights of heads of multi-token prediction, which transformers does not load.
    dropped_heads: list[str]


def model_facts(model: Any) -> ModelFacts:
    """Return what transformers says about a model. Of any other model, nothing is known.
    `_keys_to_ignore_on_load_unexpected` lists patterns for names of weights that a checkpoint may have in addition to
    those of the model. A pattern belongs to a head of multi-token prediction if it contains "mtp", or if it matches a
    layer after the last one. Without this attribute or `_is_stateful`, the report has fewer notes."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    # The names of the layer after the last one, for models with one body and for models with a body of text.
    names = [f"model.layers.{count}.x", f"model.language_model.layers.{count}.x"]
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return ModelFacts(
        layer_classes(model) if any(map(is_code_of_base_class, type(model).__mro__)) else set(),
        tuple(getattr(text, "layer_types", None) or ()),
        bool(getattr(model, "_is_stateful", False)),
        [p for p in patterns if "mtp" in p or any(re.search(p, name) for name in names)],
    )


def layer_classes(model: Any) -> set[str]:
    """Return the names of the classes of a model's layers. accelerate makes each such layer a unit of FSDP. The names
    are in the attribute `_no_split_modules`, which is empty or None if the model names no layer."""
    if not hasattr(model, "_no_split_modules"):
        raise _missing("PreTrainedModel._no_split_modules")
    return set(model._no_split_modules or ())
