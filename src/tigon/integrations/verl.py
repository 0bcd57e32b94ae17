"""Use Tigon in verl: every worker that imports this module patches the models that it trains.

    actor_rollout_ref.model.external_lib=tigon.integrations.verl

verl computes log-probabilities from the logits itself, so the loss in the head stays off. Norms, MLPs, experts,
adapters and rotary embeddings are replaced. Leave `use_liger` off. Written for verl 0.9.1: its engine for FSDP calls
`verl.models.transformers.monkey_patch.apply_monkey_patch` with each model, before it adds adapters and shards it.
"""

import functools
import importlib
import sys
from typing import Any

from tigon.integrations.frameworks import is_known_version, patch_model

__all__ = ["register"]

NAME = "apply_monkey_patch"
# The modules that hold this function. The last one may be imported before or after this module.
OWNERS = (
    "verl.models.transformers.monkey_patch",
    "verl.models.transformers",
    "verl.workers.engine.fsdp.transformer_impl",
)


def _wrap(original: Any) -> Any:
    """Return verl's function, which then also patches the model."""

    @functools.wraps(original)
    def apply_monkey_patch(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        patch_model(model, "default", {"loss": False})
        return result

    vars(apply_monkey_patch)["is_tigon"] = True
    return apply_monkey_patch


def register() -> None:
    """Let verl patch its models with Tigon. With another version of verl, warn once and change nothing."""
    if not is_known_version("verl", "0.9.1", "tigon.integrations.verl"):
        return
    original = getattr(importlib.import_module(OWNERS[0]), NAME)
    if hasattr(original, "is_tigon"):
        return
    replacement = _wrap(original)
    for owner in OWNERS:
        module = sys.modules.get(owner)
        if module is not None and getattr(module, NAME, None) is original:
            setattr(module, NAME, replacement)


register()
