"""From a name to a model on the meta device: no weight is downloaded or made, and no random state touched."""

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
from tigon.runtime.requirements import require
from tigon.tools.presets import PRESETS, preset_config

__all__ = ["NotInspected", "build", "default_config", "find_config", "find_preset", "quietly"]

# The class that trains the whole model with its loss comes first.
AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
RULE = "must be a model type, owner/name on the hub, or a file or folder that exists"


class NotInspected(ValueError):
    """Why there is no model to look at."""


def _one_line(error: BaseException) -> str:
    text = textwrap.shorten(str(error), 300, placeholder=" ...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what transformers says of defaults and of weights that are not there; and on one thread: what is computed
    is small, and on a busy machine several threads wait for each other."""
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
    """The defaults of the type's config class; where they leave number or size of heads open, the usual ones.

    Raises:
        NotInspected: the class has no defaults.
        ValueError: there is no such type; it names the nearest.
    """
    cls = config_class(model_type, RULE)
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
    """The config of a file, a folder with a config.json, a model type (its defaults), or a repository of the hub.

    Raises:
        NotInspected: `model` is none of these, or its config cannot be read.
        ValueError: `model` has no slash and is no model type; it names the nearest.
    """
    require("tigon.tools.inspect", "transformers", extra="inspect")
    from transformers import AutoConfig, PretrainedConfig

    path = Path(model).expanduser()
    here = path.is_file() or (path / "config.json").is_file()
    if not here and path.is_dir() and "/" in model:
        raise NotInspected(f"must have a config.json if it is a folder, got {model!r}")
    if not here and (path.is_absolute() or model.startswith(".") or model.count("/") > 1 or model.endswith(".json")):
        raise NotInspected(f"must be a file or folder that exists, got {model!r}")
    if not here and "/" not in model:
        return default_config(model)
    source = str(path) if here else model
    try:
        with quietly():
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # the hub's client has many kinds
        if "trust_remote_code" in str(error):
            reason = f"{model!r} comes with code of its own: --trust-remote-code allows it to run"
            raise NotInspected(reason) from error
        if isinstance(error, ValueError) and "model_type" in PretrainedConfig.get_config_dict(source)[0]:
            model_type = PretrainedConfig.get_config_dict(source)[0]["model_type"]
            config_class(model_type, f"the model_type of {model} must be one of transformers")
        raise NotInspected(f"the config of {model!r} cannot be read ({_one_line(error)})") from error


def find_preset(model: str, choices: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a preset, or what `find_config` finds.

    Raises:
        NotInspected: as `find_config`.
        ValueError: `model` might be the name of a preset and is none; "must be {choices}; or it ...", where `choices`
            begins the sentence, such as "one of A, B".
    """
    if model.lower() in (name.lower() for name in PRESETS):
        return preset_config(model)
    try:
        return find_config(model, trust_remote_code=trust_remote_code)
    except NotInspected:  # a ValueError too, that says all
        raise
    except ValueError as error:
        raise ValueError(f"must be {choices}; or it {error}") from error


def build(config: Any, *, trust_remote_code: bool = False, attention: str | None = "eager") -> tuple[nn.Module, str]:
    """The model of a config on meta, and the name of the auto class that knows it; `attention` None is its own choice.

    Raises:
        NotInspected: no auto class knows it, or its constructor fails.
    """
    import transformers

    remote = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    known = [name for name in AUTO if name in remote or type(config) in getattr(transformers, name)._model_mapping]
    if not known:
        raise NotInspected(f"transformers has no model for a {type(config).__name__} by itself")
    # Eager attention needs no package; what Tigon replaces does not depend on it.
    options = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    try:
        with quietly(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            return getattr(transformers, known[0]).from_config(config, **options), known[0]
    except Exception as error:
        reason = f"no {config.model_type} can be built from {type(config).__name__} as it is ({_one_line(error)})"
        raise NotInspected(reason) from error
