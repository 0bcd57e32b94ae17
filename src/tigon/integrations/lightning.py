"""Use Tigon in Lightning, by a callback that patches the module that is trained.

    Trainer(callbacks=[TigonCallback(memory="lean")]).fit(module)

Written for lightning 2.6.6, `lightning.pytorch.Callback`.
"""

from typing import Any

from lightning.pytorch import Callback

from tigon.hf.patch import MemoryLevel
from tigon.hf.report import Report
from tigon.integrations.frameworks import check_options, is_known_version, patch_model

__all__ = ["TigonCallback"]


class TigonCallback(Callback):
    """Patch the `LightningModule` of a trainer when `fit` begins.

    A module that exists by then is patched in `setup`, before the strategy shards it. A module that is built in
    `configure_model` is patched in `on_fit_start`. The report is logged at the level INFO and stored in `report`.

    Args:
        memory: The memory level of `tigon.patch`.
        options: The parts of `tigon.patch` to leave out, such as `rope=False`.

    Raises:
        TypeError: An option is unknown, or its value is not a bool.
        ValueError: `memory` is no level.

    Source: `lightning.pytorch.Callback` of lightning 2.6.6.
    """

    def __init__(self, memory: MemoryLevel = "default", **options: bool) -> None:
        check_options("TigonCallback", memory, options)
        self.memory, self.options = memory, options
        # The report of the module; None before `fit`, and with an unknown version of Lightning.
        self.report: Report | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patch a module that exists before `configure_model`."""
        if stage == "fit" and any(True for _ in pl_module.children()):
            self._patch(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Patch a module that `configure_model` has built."""
        if not self.report:
            self._patch(pl_module)

    def _patch(self, module: Any) -> None:
        if is_known_version("lightning", "2.6.6", "the callback for Lightning"):
            self.report = patch_model(module, self.memory, self.options)
