"""Use Tigon in ms-swift. The import adds callbacks to ms-swift, which patch the model that is trained:

    echo "import tigon.integrations.swift" > tigon_plugin.py
    swift sft --external_plugins tigon_plugin.py --callbacks tigon_lean ...

`tigon` patches at the memory level "default", `tigon_lean`, `tigon_lean_mlp` and `tigon_offload` at the others.
ms-swift reports no token accuracy where the loss is computed without the logits, as with its `use_liger_kernel`.
Written for ms-swift 4.6.0, `swift.callbacks.callbacks_map` and `swift.trainers.mixin.SwiftMixin._compute_acc`.

This file is alone in its folder, because `--external_plugins` also takes its path: ms-swift then adds the folder to
`sys.path`, where `trl.py` or `megatron.py` of Tigon would hide the packages with these names.
"""

import functools
from typing import Any

from tigon.hf.logits import SKIPPED_LOGITS
from tigon.hf.patch import MemoryLevel
from tigon.integrations.frameworks import is_known_version
from tigon.integrations.trainer import TigonCallback

__all__ = ["LEVEL_NAMES", "register"]

LEVEL_NAMES: dict[str, MemoryLevel] = {
    "tigon": "default",
    "tigon_lean": "lean",
    "tigon_lean_mlp": "lean+mlp",
    "tigon_offload": "offload",
}


def _skip_accuracy(trainer: Any) -> None:
    """Let a trainer of ms-swift compute no accuracy from logits that do not exist. ms-swift itself only knows None."""
    compute_accuracy = getattr(trainer, "_compute_acc", None)
    if compute_accuracy is None:
        return

    @functools.wraps(compute_accuracy)
    def replacement(outputs: Any, *args: Any, **kwargs: Any) -> None:
        if outputs.logits is not SKIPPED_LOGITS:
            compute_accuracy(outputs, *args, **kwargs)

    trainer._compute_acc = replacement


def _constructor(memory: MemoryLevel) -> Any:
    """Return the function that ms-swift calls with its arguments and the trainer to build the callback."""

    def construct(args: Any, trainer: Any) -> TigonCallback:
        _skip_accuracy(trainer)
        return TigonCallback(memory)

    return construct


def register() -> None:
    """Add the callbacks to the table of ms-swift; with another version, warn once and add none."""
    if not is_known_version("ms-swift", "4.6.0", "the callback 'tigon' of ms-swift"):
        return
    from swift.callbacks import callbacks_map

    callbacks_map.update({name: _constructor(memory) for name, memory in LEVEL_NAMES.items()})


register()
