"""`tigon.patch("llama")`: patch every model of a type when it is built.

The patch runs at the end of the outermost of the constructor, `from_pretrained` and `from_config`. Weights are loaded,
tied, quantised and placed by then, as they are when a user patches the model.
"""

import difflib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from tigon.hf.report import Report
from tigon.runtime.requirements import require

__all__ = ["config_class", "patch_type"]

ACTIVE: set[str] = set()
CONSTRUCTORS = ("__init__", "from_pretrained", "_from_config")
NOTE = "models of this type are patched when they are built, until restore(); models built before that stay patched"


def config_class(model_type: str, rule: str) -> type:
    """Return the config class of a model type.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: transformers has no such type. The message consists of `rule` and the nearest names.
    """
    require(f"the model type {model_type!r}", "transformers", extra="hf")
    from transformers import CONFIG_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        nearest = ", ".join(difflib.get_close_matches(model_type.lower(), CONFIG_MAPPING.keys(), cutoff=0.0))
        raise ValueError(f"{rule}, got {model_type!r}; nearest types of transformers {__version__}: {nearest}")
    return CONFIG_MAPPING[model_type]


def _classes(config: type) -> list[type]:
    """Return the model classes that are built from a config of this class."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    mappings = [m for m in vars(modeling_auto).values() if isinstance(m, type(modeling_auto.MODEL_MAPPING))]
    # Reading `m[config]` imports the file of the model.
    classes: list[type] = [PreTrainedModel] if any(m[config] for m in mappings if config in m) else []
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    return [cls for cls in classes if getattr(cls, "config_class", None) is config]


class ConstructorPatch:
    """Wraps the constructors of a model type. While `active`, the outermost constructor of each model calls `patch`."""

    def __init__(self, config: type, patch: Callable[[nn.Module], Report], report: Report) -> None:
        self.config, self.patch, self.report, self.active = config, patch, report, True
        # `thread.building` is True while a constructor runs in this thread.
        self.thread = threading.local()

    def wrap(self, cls: type, name: str) -> Callable[[], None]:
        """Wrap a constructor of `cls`; return a function that unwraps it, unless other code has wrapped it since."""
        override, stock = vars(cls).get(name), inspect.getattr_static(cls, name)

        @functools.wraps(function := getattr(stock, "__func__", stock))
        def build(subject: Any, *args, **kwargs) -> Any:
            is_outermost, self.thread.building = not getattr(self.thread, "building", False), True
            try:
                result = function(subject, *args, **kwargs)
            finally:
                self.thread.building = not is_outermost
            model = subject if result is None else result[0] if isinstance(result, tuple) else result
            if self.active and is_outermost and model.config.model_type == self.config.model_type:
                # Only the entries are copied: the new report's `undo` would keep the model alive.
                latest, report = self.patch(model), self.report
                report.model = f"every new {self.config.model_type}, the last a {latest.model}"
                report.empty, report.entries, report.notes = latest.empty, latest.entries, [NOTE, *latest.notes]
                report.outcomes = latest.outcomes
            return result

        setattr(cls, name, wrapper := classmethod(build) if isinstance(stock, classmethod) else build)

        def undo() -> None:
            self.active = False
            if vars(cls).get(name) is wrapper:
                delattr(cls, name) if override is None else setattr(cls, name, override)

        return undo


def patch_type(model_type: str, patch: Callable[[nn.Module], Report]) -> Report:
    """Run `patch` on every new model of the type. The report describes the last one, and its `restore()` ends this."""
    config, report = config_class(model_type, "patch: model must be a model type"), Report(f"every new {model_type}")
    if model_type in ACTIVE:
        report.notes.append(
            "an earlier call already patches models of this type when they are built: nothing was changed"
        )
        return report
    constructor_patch, classes = ConstructorPatch(config, patch, report), _classes(config)
    if not classes:
        raise ValueError(
            f"patch: {model_type!r} is built as a part of other models only; patch the types of those models"
        )
    report.empty, report.notes = "none built yet", [NOTE]
    ACTIVE.add(model_type)
    report.undo = [constructor_patch.wrap(cls, name) for cls in classes for name in CONSTRUCTORS]
    report.undo.append(functools.partial(ACTIVE.discard, model_type))
    return report
