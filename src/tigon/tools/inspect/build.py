"""Build a model on the meta device from a name. No weight is downloaded or allocated, and no random state changes."""

import contextlib
import logging
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tigon.hf.by_type import config_class
from tigon.hf.transformers_private import auto_class_has
from tigon.runtime.requirements import require
from tigon.tools.presets import PRESETS, preset_config

__all__ = ["NotInspected", "build", "default_config", "find_config", "find_preset", "quietly"]

# These are auto classes of transformers. The class that trains the whole model with its loss comes first.
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
MODEL_RULE = "must be a model type, owner/name on the hub, or a file or folder that exists"


class NotInspected(ValueError):
    """The model cannot be inspected; the message says why."""


def _one_line(error: BaseException) -> str:
    """Return the type and the message of an error in one line of at most some 300 characters."""
    text = textwrap.shorten(str(error), 300, placeholder=" ...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence warnings in a block, and run torch on one thread there.

    transformers warns about defaults and about missing weights. The computations are small, and on a busy machine
    several threads would wait for each other.
    """
    logger = logging.getLogger("transformers")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)


def default_config(model_type: str) -> Any:
    """Return a config of the type with the defaults of its class.

    If the defaults do not set the number of key and value heads or the size of a head, the usual values are used.

    Raises:
        NotInspected: The class has no defaults.
        ValueError: There is no such type. The message names the nearest ones.
    """
    cls = config_class(model_type, MODEL_RULE)
    try:
        with quietly():
            config = cls()
    except Exception as error:
        raise NotInspected(f"the config class of {model_type} has no defaults ({_one_line(error)})") from error
    heads, width = (vars(config).get(name) for name in ("num_attention_heads", "hidden_size"))
    if isinstance(heads, int) and isinstance(width, int):
        for name, value in {"num_key_value_heads": heads, "head_dim": width // heads}.items():
            if vars(config).get(name, value) is None:
                setattr(config, name, value)
    return config


def find_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a file, a folder with a config.json, a model type (its defaults), or a repository.

    Args:
        model: The path, the model type, or the name of the repository on the hub (owner/name).
        trust_remote_code: Whether code of the repository may run.

    Raises:
        NotInspected: `model` is none of these, or its config cannot be read.
        ValueError: `model` has no slash and is no model type. The message names the nearest types.
    """
    require("tigon.tools.inspect", "transformers", extra="inspect")
    from transformers import AutoConfig, PretrainedConfig

    path = Path(model).expanduser()
    is_local = path.is_file() or (path / "config.json").is_file()
    if not is_local and path.is_dir() and "/" in model:
        raise NotInspected(f"must have a config.json if it is a folder, got {model!r}")
    if not is_local and (
        path.is_absolute() or model.startswith(".") or model.count("/") > 1 or model.endswith(".json")
    ):
        raise NotInspected(f"must be a file or folder that exists, got {model!r}")
    if not is_local and "/" not in model:
        return default_config(model)
    source = str(path) if is_local else model
    try:
        with quietly():
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    # The client of the hub raises errors of many classes.
    except Exception as error:
        if "trust_remote_code" in str(error):
            reason = f"{model!r} comes with its own code; --trust-remote-code allows this code to run"
            raise NotInspected(reason) from error
        if isinstance(error, ValueError) and "model_type" in PretrainedConfig.get_config_dict(source)[0]:
            model_type = PretrainedConfig.get_config_dict(source)[0]["model_type"]
            config_class(model_type, f"the model_type of {model} must be one of transformers")
        raise NotInspected(f"the config of {model!r} cannot be read ({_one_line(error)})") from error


def find_preset(model: str, choices: str, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a preset, or else the config that `find_config` returns.

    Args:
        model: The name of a preset, or an argument of `find_config`.
        choices: The choices that the error message names, such as "one of A, B".
        trust_remote_code: Whether code of the repository may run.

    Raises:
        NotInspected: The error of `find_config`.
        ValueError: `model` is neither a preset nor a model type: "must be {choices}; or it ...".
    """
    if model.lower() in (name.lower() for name in PRESETS):
        return preset_config(model)
    try:
        return find_config(model, trust_remote_code=trust_remote_code)
    # NotInspected is a ValueError too, but its message is complete.
    except NotInspected:
        raise
    except ValueError as error:
        raise ValueError(f"must be {choices}; or it {error}") from error


def build(config: Any, *, trust_remote_code: bool = False, attention: str | None = "eager") -> tuple[nn.Module, str]:
    """Return the model of a config on the meta device, and the name of the auto class that builds it.

    Args:
        config: A config of transformers.
        trust_remote_code: Whether code of the model's repository may run.
        attention: The implementation of attention. None lets the model choose.

    Raises:
        NotInspected: No auto class builds a model from this config, or the constructor fails.
        RuntimeError: transformers lacks a private name that this needs.
    """
    import transformers

    remote = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    auto_class = next((name for name in AUTO_CLASSES if name in remote or auto_class_has(name, type(config))), None)
    if auto_class is None:
        raise NotInspected(f"transformers has no model that is built from a {type(config).__name__} alone")
    # Eager attention needs no other package. The parts that Tigon replaces do not depend on this choice.
    options = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    try:
        with quietly(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            return getattr(transformers, auto_class).from_config(config, **options), auto_class
    except Exception as error:
        reason = f"no {config.model_type} can be built from this {type(config).__name__} ({_one_line(error)})"
        raise NotInspected(reason) from error
