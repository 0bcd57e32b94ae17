"""Use Tigon in ms-swift: the file registers callbacks, which patch the model that is trained.

    swift sft --external_plugins "$(python -c 'import tigon.integrations.swift as s; print(s.__file__)')" \
        --callbacks tigon_lean ...

`tigon` patches at the memory level "default", `tigon_lean`, `tigon_lean_mlp` and `tigon_offload` at the others.
ms-swift runs this file by its path. Written for ms-swift 4.6.0, `swift.callbacks.callbacks_map`.
"""

from typing import Any

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


def _constructor(memory: MemoryLevel) -> Any:
    """Return the function that ms-swift calls with its arguments and the trainer to build the callback."""
    return lambda args, trainer: TigonCallback(memory)


def register() -> None:
    """Add the callbacks to the table of ms-swift; with another version, warn once and add none."""
    if not is_known_version("ms-swift", "4.6.0", "the callback 'tigon' of ms-swift"):
        return
    from swift.callbacks import callbacks_map

    callbacks_map.update({name: _constructor(memory) for name, memory in LEVEL_NAMES.items()})


register()
