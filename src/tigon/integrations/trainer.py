"""Use Tigon in the Trainer of transformers, by a callback that patches the model.

Trainer(model, args, train_dataset=..., callbacks=[TigonCallback(memory="lean")]).train()
"""

import weakref
from typing import Any

from transformers import TrainerCallback

from tigon.hf.report import Report
from tigon.integrations.frameworks import check_options, patch_model
from tigon.memory.levels import Memory, MemoryLevel

__all__ = ["TigonCallback"]


class TigonCallback(TrainerCallback):
    """Patch the model of a `transformers.Trainer`.

    The model is patched at the end of the trainer's constructor, before it is sharded. If the callback was added later,
    or if the trainer has a `model_init`, the model is patched at the start of training. The report is logged at the
    level INFO and stored in `report`.

    Args:
        memory: The memory level of `tigon.patch`. Set `gradient_checkpointing=False` in the training arguments, because
            a checkpointed layer saves only its input at every level.
        options: The parts of `tigon.patch` to leave out, such as `rope=False`.

    Raises:
        TypeError: An option is unknown, or its value is not a bool.
        ValueError: `memory` is no level.

    Source: `transformers.TrainerCallback` of transformers 5.17.

    Example:
        >>> callback = tigon.integrations.trainer.TigonCallback(memory="lean", rope=False)
        >>> callback.report is None
        True
    """

    def __init__(self, memory: Memory | MemoryLevel | str = "default", **options: bool) -> None:
        check_options("TigonCallback", memory, options)
        self.memory, self.options = memory, options
        # The report of the latest model that was patched.
        self.report: Report | None = None
        # The reference is weak, so that the callback does not keep the model alive.
        self._patched_model: weakref.ref[Any] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model that the trainer was built with."""
        self._patch(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model if it has not been patched yet."""
        self._patch(model)

    def _patch(self, model: Any) -> None:
        patched_model = None if self._patched_model is None else self._patched_model()
        # At the start of training, FSDP or a compiler may have wrapped the model that was patched.
        if model is None or (patched_model is not None and any(m is patched_model for m in model.modules())):
            return
        self.report = patch_model(model, self.memory, self.options)
        self._patched_model = weakref.ref(model)
