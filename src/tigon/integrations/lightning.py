"""Use Tigon in Lightning, by a callback that patches the module that is trained.

    Trainer(callbacks=[TigonCallback(memory="lean")]).fit(module)

Written for lightning 2.6.6, `lightning.pytorch.Callback`.
"""

import warnings
import weakref
from typing import Any

from torch import nn

from tigon.hf.patch import MemoryLevel
from tigon.hf.report import Report
from tigon.integrations.frameworks import check_options, is_known_version, patch_model, require_framework

require_framework("tigon.integrations.lightning", "lightning", "lightning")
from lightning.pytorch import Callback  # noqa: E402

__all__ = ["TigonCallback"]


class TigonCallback(Callback):
    """Patch the `LightningModule` of a trainer when `fit` begins.

    Modules that exist by then are patched in `setup`, before the strategy shards them. Modules that the
    `LightningModule` builds later, in its own `setup` or in `configure_model`, are patched in `on_fit_start`, after the
    strategy has wrapped the model. For FSDP and ZeRO, build the model in `__init__`, or call `tigon.patch` where you
    build it. The report is logged at the level INFO and stored in `report`.

    Args:
        memory: The memory level of `tigon.patch`.
        options: The parts of `tigon.patch` to leave out, such as `rope=False`.

    Raises:
        TypeError: An option is unknown, or its value is not a bool.
        ValueError: `memory` is no level.

    Source: `lightning.pytorch.Callback` of lightning 2.6.6.
    """

    def __init__(self, memory: MemoryLevel | str = "default", **options: bool) -> None:
        check_options("TigonCallback", memory, options)
        self.memory, self.options = memory, options
        # The report of the latest patch; None before `fit`, and with an unknown version of Lightning.
        self.report: Report | None = None
        self._known_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patch the modules that exist before `configure_model`."""
        if stage == "fit":
            with warnings.catch_warnings():
                # The model may be built later.
                warnings.filterwarnings("ignore", r"tigon\.patch\(.*\): nothing was (recognised|replaced)")
                self._patch(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Patch the modules that were built since."""
        self._patch(pl_module)

    def _patch(self, module: Any) -> None:
        modules = [m for child in module.children() for m in child.modules()]
        # The strategy adds its own modules, and they need no patch.
        new = [m for m in modules if m not in self._known_modules and not _is_wrapper(m)]
        is_needed = new or (self.report is not None and not self.report.replaced)
        if is_needed and is_known_version("lightning", "2.6.6", "the callback for Lightning"):
            self._known_modules.update(new)
            self.report = patch_model(module, self.memory, self.options)


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.distributed", "torch.nn.parallel", "deepspeed"))
