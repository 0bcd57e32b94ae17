"""`tigon.patch("llama")`: patch every model of a type when it is built.

A model is built by its constructor, by `from_pretrained` or by `from_config`, and these may call each other. The patch
runs at the end of the outermost call. By then the weights are loaded, tied, quantised and on their devices, as they are
when a user patches the model.
"""

import difflib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from tigon.hf.report import Report
from tigon.hf.transformers_private import constructors, model_mappings
from tigon.runtime.requirements import require

ACTIVE: set[str] = set()
NOTE = "models of this type are patched when they are built, until restore(); models built before that stay patched"


def config_class(model_type: str, rule: str, hint: str = "") -> Any:
    """Return the config class of a model type."""
    require(f"the model type {model_type!r}", "transformers", extra="hf")
    from transformers import CONFIG_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        nearest = ", ".join(difflib.get_close_matches(model_type.lower(), CONFIG_MAPPING.keys(), cutoff=0.0))
        raise ValueError(f"{rule}, got {model_type!r}; nearest types of transformers {__version__}: {nearest}{hint}")
    return CONFIG_MAPPING[model_type]


def _classes(config: type) -> list[type]:
    """Return the model classes that are built from a config of this class."""
    from transformers import PreTrainedModel

    # Reading `mapping[config]` imports the file of the model.
    is_built = any(mapping[config] for mapping in model_mappings() if config in mapping)
    classes: list[type] = [PreTrainedModel] if is_built else []
    for cls in classes:
        subclasses: list[type] = cls.__subclasses__()
        classes += [subclass for subclass in subclasses if subclass not in classes]
    return [cls for cls in classes if getattr(cls, "config_class", None) is config]


class ConstructorPatch:
    """Wraps the constructors of a model type. While `active`, the outermost constructor of each model calls `patch`."""

    def __init__(self, config: Any, patch: Callable[[nn.Module], Report], report: Report) -> None:
        self.config, self.patch, self.report, self.active = config, patch, report, True
        # `thread.building` is True while a constructor runs in this thread.
        self.thread = threading.local()

    def wrap(self, cls: type, name: str) -> Callable[[], None]:
        """Wrap a constructor of `cls`; return a function that unwraps it, unless other code has wrapped it since."""
        override, stock = vars(cls).get(name), inspect.getattr_static(cls, name)

        @functools.wraps(function := getattr(stock, "__func__", stock))
        def build(subject: Any, *args: Any, **kwargs: Any) -> Any:
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
                report.empty, report.entries, report.outcomes = latest.empty, latest.entries, latest.outcomes
                # The notes are shared, because the model may add warnings to them later.
                report.take_notes(latest)
                report.notes.insert(0, NOTE)
            return result

        wrapper: Any = classmethod(build) if isinstance(stock, classmethod) else build
        setattr(cls, name, wrapper)

        def undo() -> None:
            self.active = False
            if vars(cls).get(name) is wrapper:
                delattr(cls, name) if override is None else setattr(cls, name, override)

        return undo


def patch_type(model_type: str, patch: Callable[[nn.Module], Report]) -> Report:
    """Run `patch` on every new model of the type until `restore()` of the report, which describes the last model."""
    config, report = config_class(model_type, "patch: model must be a model type"), Report(f"every new {model_type}")
    if model_type in ACTIVE:
        report.notes.append(
            "an earlier call already patches models of this type when they are built: nothing was changed"
        )
        return report
    constructor_patch, classes, names = ConstructorPatch(config, patch, report), _classes(config), constructors()
    if not classes:
        raise ValueError(
            f"patch: {model_type!r} is built as a part of other models only; patch the types of those models"
        )
    report.empty = "none built yet"
    report.notes.append(NOTE)
    ACTIVE.add(model_type)
    report.undo = [constructor_patch.wrap(cls, name) for cls in classes for name in names]
    report.undo.append(functools.partial(ACTIVE.discard, model_type))
    return report
