"""Use Tigon in axolotl. Two lines of the YAML configuration are enough:

    plugins: [tigon.integrations.axolotl.TigonPlugin]
    tigon_memory: lean

Written for axolotl 0.19.0, `axolotl.integrations.base.BasePlugin`.
"""

from typing import Any

from tigon.hf.levels import LEVEL_NAMES, find_level
from tigon.integrations.frameworks import check_options, is_known_version, patch_model, require_framework

require_framework("tigon.integrations.axolotl", "axolotl", "axolotl")
from axolotl.integrations.base import BasePlugin  # noqa: E402
from pydantic import BaseModel, field_validator  # noqa: E402

__all__ = ["TigonArgs", "TigonPlugin"]


class TigonArgs(BaseModel):
    """The keys of an axolotl configuration that the plug-in reads."""

    # The memory level of `tigon.patch`, such as "lean" or "lean+mlp:4". None means "default".
    tigon_memory: str | None = None
    # The parts of `tigon.patch` to leave out, such as {"rope": false}.
    tigon_options: dict[str, bool] | None = None

    @field_validator("tigon_memory")
    @classmethod
    def check_memory(cls, level: str | None) -> str | None:
        """Refuse a name that is no level, when axolotl reads the configuration."""
        if level is not None and find_level(level) is None:
            raise ValueError(f"tigon_memory must be one of {LEVEL_NAMES}, got {level!r}")
        return level


class TigonPlugin(BasePlugin):
    """Patch the model after axolotl has loaded it and added its adapters."""

    def get_input_args(self) -> str:
        """Return the name of the model of the plug-in's arguments."""
        return "tigon.integrations.axolotl.TigonArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch the model at the level `cfg.tigon_memory`.

        The trainers of `cfg.rl` compute their losses from the logits themselves, so the loss in the head stays off.
        """
        memory, options = cfg.tigon_memory or "default", dict(cfg.tigon_options or {})
        if cfg.rl:
            options["loss"] = False
        check_options("tigon.integrations.axolotl", memory, options)
        if is_known_version("axolotl", "0.19.0", "TigonPlugin"):
            patch_model(model, memory, options)
