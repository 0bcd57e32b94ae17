"""Build a model on the meta device from a name. No weight is downloaded or allocated, and no random state changes."""

import contextlib
import difflib
import logging
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tigon.cli.presets import PRESETS, find_preset
from tigon.hf.by_type import config_class
from tigon.hf.transformers_private import auto_class_has
from tigon.runtime.requirements import require

# These are auto classes of transformers. The class that trains the whole model with its loss comes first.
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
MODEL_RULE = (
    f"must be a preset ({', '.join(PRESETS)}), a model type, owner/name on the hub, or a file or folder that exists"
)


class NotInspected(ValueError):
    """The model cannot be inspected; the message says why."""


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error in one line of at most some 300 characters."""
    text = textwrap.shorten(str(error), 300, placeholder=" ...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence warnings in a block, and run torch on one thread there. transformers warns about defaults and about
    missing weights. The computations are small, and on a busy machine several threads would wait for each other."""
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
    """Return a config of the type with the defaults of its class. The error of an unknown type names the nearest ones.
    If the defaults do not set the number of key and value heads or the size of a head, the usual values are used."""
    presets = {name.lower(): name for name in PRESETS}
    nearest = [presets[name] for name in difflib.get_close_matches(model_type.lower(), presets)]
    cls = config_class(model_type, MODEL_RULE, f"; nearest presets: {', '.join(nearest)}" if nearest else "")
    try:
        with quietly():
            config = cls()
    except Exception as error:
        raise NotInspected(f"the config class of {model_type} has no defaults ({one_line(error)})") from error
    heads, width = (vars(config).get(name) for name in ("num_attention_heads", "hidden_size"))
    if isinstance(heads, int) and isinstance(width, int):
        for name, value in {"num_key_value_heads": heads, "head_dim": width // heads}.items():
            if vars(config).get(name, value) is None:
                setattr(config, name, value)
    return config


def find_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the config for the name of a model. All commands that load a config by name use this function.

    `model` is a file, a folder with a config.json, a preset, a model type (its defaults), or the name of a repository
    on the hub (owner/name). If a name matches several of these, the first one is used.

    >>> find_config("Llama-3-8B").hidden_size
    4096
    """
    require("tigon.cli.inspect", "transformers", extra="hf")
    from transformers import AutoConfig, PretrainedConfig

    path = Path(model).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        source = str(path)
    elif path.is_dir() and "/" in model:
        raise NotInspected(f"must have a config.json if it is a folder, got {model!r}")
    elif path.is_absolute() or model.startswith(".") or model.count("/") > 1 or model.endswith(".json"):
        raise NotInspected(f"must be a file or folder that exists, got {model!r}")
    elif (preset := find_preset(model)) is not None:
        return AutoConfig.for_model(**preset)
    elif "/" not in model:
        return default_config(model)
    else:
        source = model
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
        raise NotInspected(f"the config of {model!r} cannot be read ({one_line(error)})") from error


def build(config: Any, *, trust_remote_code: bool = False, attention: str | None = "eager") -> tuple[nn.Module, str]:
    """Return the model of a config on meta, and the name of its auto class. `attention` None lets the model choose."""
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
        reason = f"no {config.model_type} can be built from this {type(config).__name__} ({one_line(error)})"
        raise NotInspected(reason) from error
