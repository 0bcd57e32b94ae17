"""Use Tigon in the Trainer of transformers, by a callback that patches the model.

Trainer(model, args, train_dataset=..., callbacks=[TigonCallback(memory="lean")]).train()
"""

import logging
import warnings
import weakref
from typing import Any

from torch import nn
from transformers import TrainerCallback

from tigon.hf.patch import Request, make_request, patch_instance
from tigon.hf.report import Report
from tigon.memory.levels import Memory, MemoryLevel
from tigon.runtime.requirements import require_for

LOGGER = logging.getLogger("tigon")

# Other packages that replace the forwards of models. Their names begin the module that contains such a forward.
KERNEL_LIBRARIES = {"liger_kernel": "Liger Kernel", "unsloth": "Unsloth", "kernels": "kernels", "axolotl": "axolotl"}


class TigonCallback(TrainerCallback):
    """Patch the model of a `transformers.Trainer`.

    The model is patched at the end of the trainer's constructor, before it is sharded. If the callback was added later,
    or if the trainer has a `model_init`, the model is patched at the start of training. The report is logged at the
    level INFO and stored in `report`.

    Args:
        memory: The memory level of `tigon.patch`. Set `gradient_checkpointing=False` in the training arguments, because
            a checkpointed layer saves only its input at every level.
        pad_to: The option of `tigon.patch`, for batches of uneven lengths.
        options: The other options of `tigon.patch`, such as `rope=False` or `fp8="tensorwise"`.

    Raises:
        TypeError: An option is unknown, or of the wrong type.
        ValueError: `memory` is no level, `fp8` is no recipe, or `pad_to` is below 1.

    Source: `transformers.TrainerCallback` of transformers 5.17.

    Example:
        >>> callback = tigon.integrations.trainer.TigonCallback(memory="lean", rope=False)
        >>> callback.report is None
        True
    """

    def __init__(
        self, memory: Memory | MemoryLevel | str = "default", pad_to: int | None = None, **options: Any
    ) -> None:
        self.request = make_request("TigonCallback", {"memory": memory, "pad_to": pad_to, **options})
        self.report: Report | None = None
        # The reference is weak, so that the callback does not keep the model alive.
        self._patched_model: weakref.ref[Any] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model that the trainer was built with, if it has not been patched yet."""
        self._patch(model)

    on_train_begin = on_init_end

    def _patch(self, model: Any) -> None:
        patched_model = None if self._patched_model is None else self._patched_model()
        # At the start of training, FSDP or a compiler may have wrapped the model that was patched.
        if model is None or (patched_model is not None and any(m is patched_model for m in model.modules())):
            return
        self.report = _patch_model(model, self.request)
        self._patched_model = weakref.ref(model)


def _patch_model(model: nn.Module, request: Request) -> Report | None:
    """Patch a model, log the report, and warn of other kernel libraries; return None if transformers is too old."""
    try:
        require_for([*model.modules()])
    except ImportError as error:
        warnings.warn(f"tigon: the model is trained without Tigon: {error}", stacklevel=4)
        return None
    report = patch_instance(model, request)
    LOGGER.info("%s", report)
    for package, name in KERNEL_LIBRARIES.items():
        entries = [entry for entry in report.left_alone if f"already replaced (by {package}" in entry.detail]
        if entries:
            classes = ", ".join(sorted({entry.module for entry in entries}))
            warnings.warn(
                f"tigon: {name} has replaced the forward of {classes} before tigon.patch, so these modules run on "
                f"{name}; switch {name} off in the trainer's configuration to run them on Tigon",
                stacklevel=4,
            )
    return report
