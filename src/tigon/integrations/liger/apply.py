"""Liger's functions that patch models, generated from a table of their parameters, on `tigon.patch`.

Each row names a model type of Liger 0.8.5 and the parameters of its function in order. A minus sign marks a parameter
whose default is False. `cross_entropy=True` without the fused loss keeps the loss of transformers, because the caller
then expects logits.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tigon.hf.auto import AutoModelForCausalLM
from tigon.hf.by_type import config_class
from tigon.hf.patch import patch
from tigon.hf.report import Report

_HEAD = "-cross_entropy fused_linear_cross_entropy"
_SWIGLU = f"rope {_HEAD} rms_norm swiglu model"
_GEGLU = f"rope {_HEAD} rms_norm geglu model"
_NO_ROPE = f"-rope {_HEAD} rms_norm swiglu model"
_VISION_GEGLU = f"rope {_HEAD} layer_norm rms_norm geglu model"
_VISION_SWIGLU = f"rope {_HEAD} layer_norm rms_norm swiglu model"

PARAMETERS = {
    **dict.fromkeys(
        (
            "llama", "smollm3", "ministral", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl",
            "qwen3_vl_moe", "phi3", "olmo2", "olmo3", "falcon_h1", "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4",
        ),
        _SWIGLU,
    ),
    **dict.fromkeys(
        ("glm4", "glm4v", "glm4v_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"), _NO_ROPE
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEGLU),
    **dict.fromkeys(("gemma3", "paligemma"), _VISION_GEGLU),
    **dict.fromkeys(("mllama", "muse_glimmer"), _VISION_SWIGLU),
    **dict.fromkeys(("internvl", "smolvlm"), f"{_HEAD} rms_norm layer_norm model **"),
    **dict.fromkeys(("gpt_oss", "qwen3_vl"), f"rope {_HEAD} rms_norm -swiglu model"),
    "granite": "rope cross_entropy -fused_linear_cross_entropy rms_norm swiglu model",
    "llava": f"{_HEAD} model **",
    "llama4": f"rope {_HEAD} rms_norm swiglu model layer_norm",
    "nemotron": f"relu_squared {_HEAD} model **",
    "pixtral": "rope rms_norm swiglu model",
    "gemma4_text": f"-rope {_HEAD} rms_norm geglu model",
    "gemma4": f"-rope {_HEAD} -layer_norm rms_norm geglu model",
    "qwen2_vl": f"rope {_HEAD} rms_norm layer_norm swiglu model",
    "deepseek_v4": f"-rope {_HEAD} rms_norm -swiglu model",
}  # fmt: skip

# Further model types whose models a function patches.
SAME_FUNCTION = {
    "llama4_text": "llama4", "mllama_text_model": "mllama", "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_vl_text": "qwen3_vl", "qwen3_vl_moe_text": "qwen3_vl_moe",
}  # fmt: skip

logger = logging.getLogger(__name__)

# The patches of model types that are in force. A second call replaces the options of the first one.
_reports: dict[str, Report] = {}


def _signature(row: str) -> inspect.Signature:
    parameters = []
    for word in row.split():
        if word == "**":
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
        else:
            default = None if word == "model" else not word.startswith("-")
            name = word.removeprefix("-")
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def _parts(options: dict[str, Any], others: bool) -> dict[str, Any]:
    """Translate Liger's options into those of `tigon.patch`; `others` is the value of the options that are absent."""

    def is_on(*names: str) -> bool:
        return any(bool(options.get(name, others)) for name in names if name in options or others)

    gated = [name for name in ("swiglu", "geglu") if name in options] or ["swiglu"]
    is_gated, is_relu2, is_rms = is_on(*gated), is_on("relu_squared"), is_on("rms_norm")
    return {
        "rms_norm": is_rms,
        "fused_statements": is_rms,
        "layer_norm": is_on("layer_norm"),
        "glu": is_gated,
        "experts": is_gated,
        "mlp": is_relu2,
        "relu2": is_relu2,
        "gelu": False,
        "rope": is_on("rope"),
        "mixers": is_rms,
        "loss": bool(options.get("fused_linear_cross_entropy", False)),
    }


def _make_apply(model_type: str, row: str) -> Callable[..., None]:
    signature, name = _signature(row), f"apply_liger_kernel_to_{model_type}"
    has_kwargs = row.endswith("**")

    def apply(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        model, further = options.pop("model"), options.pop("kwargs", {})
        options |= further
        if options.get("cross_entropy") and options.get("fused_linear_cross_entropy"):
            raise ValueError(f"{name}: cross_entropy and fused_linear_cross_entropy cannot both be True")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{name}: model must be a torch.nn.Module or None, got {type(model).__name__}")
        parts = _parts(options, has_kwargs)
        if model is not None:
            patch(model, **parts)
            return
        if model_type in _reports:
            _reports.pop(model_type).restore()
        _reports[model_type] = patch(model_type, **parts)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"Patch a {model_type} model with `tigon.patch`, or without `model` every one that is built later."
    vars(apply)["__signature__"] = signature
    return apply


APPLY = {f"apply_liger_kernel_to_{name}": _make_apply(name, row) for name, row in PARAMETERS.items()}
globals().update(APPLY)

# The function of each type that Liger knows. A program may put functions of its own into the map.
MODEL_TYPE_TO_APPLY_LIGER_FN = {name: APPLY[f"apply_liger_kernel_to_{name}"] for name in PARAMETERS}
MODEL_TYPE_TO_APPLY_LIGER_FN |= {name: MODEL_TYPE_TO_APPLY_LIGER_FN[same] for name, same in SAME_FUNCTION.items()}
_SERVED = dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def restore_types() -> None:
    """Stop patching the models that are built from now on."""
    while _reports:
        _reports.popitem()[1].restore()


def _apply_function(model_type: str) -> Callable[..., None]:
    """Return the function of a type. A type that Liger does not know has the parameters of Llama."""
    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type) or _make_apply(model_type, _SWIGLU)


def _known_options(function: Callable[..., None], options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch every model of the type that is built from now on. Options that its function lacks are ignored."""
    if not model_type:
        return
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        try:
            config_class(model_type, "_apply_liger_kernel patches nothing: model_type must be a model type")
        except ValueError as error:
            logger.warning("%s", error)
            return
    function = _apply_function(model_type)
    function(**_known_options(function, kwargs))


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch this model. Options that the function of its type lacks are ignored."""
    function = _apply_function(getattr(getattr(model, "config", None), "model_type", None) or "model")
    function(model=model, **_known_options(function, kwargs))


def _own_functions() -> dict[Any, Callable[..., Any]]:
    """Return the functions that a program has put into the map of types."""
    return {name: function for name, function in MODEL_TYPE_TO_APPLY_LIGER_FN.items() if _SERVED.get(name) != function}


class AutoLigerKernelForCausalLM:
    """Builds models as `transformers.AutoModelForCausalLM` does, and patches them."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Return the patched model. Options of Liger's apply functions are taken from the keyword arguments."""
        model_type = None
        if _own_functions():
            import transformers

            model_type = transformers.AutoConfig.from_pretrained(pretrained_model_name_or_path, **kwargs).model_type
        return cls._build("from_pretrained", model_type, (pretrained_model_name_or_path, *model_args), kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Return the patched model. Options of Liger's apply functions are taken from the keyword arguments."""
        return cls._build("from_config", getattr(config, "model_type", None), (config,), kwargs)

    @classmethod
    def _build(cls, method: str, model_type: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Build a model and patch it, or let the function patch it that the program has put into the map of types."""
        if (function := _own_functions().get(model_type)) is None:
            parts = cls._pop_parts(kwargs)
            return getattr(AutoModelForCausalLM, method)(*args, patch_options=parts, **kwargs)
        import transformers

        options = _known_options(function, kwargs)
        function(**options)
        others = {name: value for name, value in kwargs.items() if name not in options}
        return getattr(transformers.AutoModelForCausalLM, method)(*args, **others)

    @classmethod
    def _pop_parts(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take Liger's options out of keyword arguments, and return those of `tigon.patch`."""
        names = [word.removeprefix("-") for row in PARAMETERS.values() for word in row.split()]
        options = {name: kwargs.pop(name) for name in dict.fromkeys(names) if name in kwargs and name != "model"}
        options = {"fused_linear_cross_entropy": True} | options
        if options.get("cross_entropy") and options["fused_linear_cross_entropy"]:
            raise ValueError(
                f"{cls.__name__}: cross_entropy and fused_linear_cross_entropy, which is True by default, cannot both "
                "be True"
            )
        return _parts(options, others=True)


# The functions below belong to `liger_kernel.utils`.
def is_peft_available() -> bool:
    """Return whether peft can be imported."""
    return importlib.util.find_spec("peft") is not None


def is_transformers_available() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def is_npu_available() -> bool:
    """Return whether torch has an Ascend NPU."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def infer_device() -> str:
    """Return "cuda" (also for AMD), "npu", "xpu" or "cpu", the first that is available."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"
