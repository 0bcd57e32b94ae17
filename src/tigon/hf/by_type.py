"""`tigon.patch("llama")`: every model of a type is patched at the end of its constructor, or of `from_pretrained` or
`from_config` around it: weights are loaded, tied, quantised and placed by then, as if its user had patched it.
"""

import difflib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from tigon.hf.report import Report

__all__ = ["config_class", "patch_type"]

ACTIVE: set[str] = set()
CONSTRUCTORS = ("__init__", "from_pretrained", "_from_config")


def config_class(model_type: str, what: str = "patch: model") -> type:
    """The config class of a model type; a ValueError with the nearest names if there is no such type."""
    from transformers import CONFIG_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        nearest = ", ".join(difflib.get_close_matches(model_type.lower(), CONFIG_MAPPING.keys(), cutoff=0.0))
        raise ValueError(
            f"{what} must be a model type of transformers {__version__}, got {model_type!r}; nearest: {nearest}"
        )
    return CONFIG_MAPPING[model_type]


def _classes(config: type) -> list[type]:
    """The model classes that are built from a config of this class."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    mappings = [m for m in vars(modeling_auto).values() if isinstance(m, type(modeling_auto.MODEL_MAPPING))]
    found: list[type] = [PreTrainedModel] if any(m[config] for m in mappings if config in m) else []  # imports its file
    for cls in found:
        found += [sub for sub in cls.__subclasses__() if sub not in found]
    return [cls for cls in found if getattr(cls, "config_class", None) is config]


def patch_type(model_type: str, patch: Callable[[nn.Module], Report]) -> Report:
    """Let `patch` run on every new model of the type. The report is that of the last one; `restore()` ends it."""
    config, inside = config_class(model_type), threading.local()
    report = Report(f"every new {model_type}, none built so far")
    if model_type in ACTIVE:
        report.notes.append("models of this type are patched when they are built already: nothing was changed")
        return report
    note = "models of this type are patched when they are built, until restore(); what was built stays patched"

    def end_with_patch(cls: type, name: str) -> Callable[[], None]:
        own, stock = vars(cls).get(name), inspect.getattr_static(cls, name)

        @functools.wraps(function := getattr(stock, "__func__", stock))
        def build(subject: Any, *args, **kwargs) -> Any:
            outermost, inside.a_build = not getattr(inside, "a_build", False), True
            try:
                result = function(subject, *args, **kwargs)
            finally:
                inside.a_build = not outermost
            model = subject if result is None else result[0] if isinstance(result, tuple) else result
            if outermost and report.undo and model.config.model_type == config.model_type:
                made = patch(model)  # whose undo would keep the model
                report.model = f"every new {model_type}, the last a {made.model}"
                report.entries, report.notes = made.entries, [note, *made.notes]
            return result

        wrapper = classmethod(build) if isinstance(stock, classmethod) else build
        setattr(cls, name, wrapper)

        def undo() -> None:
            if vars(cls).get(name) is wrapper:
                delattr(cls, name) if own is None else setattr(cls, name, own)

        return undo

    report.undo = [end_with_patch(cls, name) for cls in _classes(config) for name in CONSTRUCTORS]
    if not report.undo:
        raise ValueError(f"patch: {model_type!r} is built as a part of other models only: patch by their types")
    report.notes.append(note)
    ACTIVE.add(model_type)
    report.undo.append(lambda: ACTIVE.discard(model_type))
    return report
