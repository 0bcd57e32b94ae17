"""Use Tigon in verl: every worker that imports this module patches the models that it trains.

    actor_rollout_ref.model.external_lib=tigon.integrations.verl

verl computes log-probabilities from the logits itself, so the loss in the head stays off. Norms, MLPs, experts,
adapters and rotary embeddings are replaced. Leave `use_liger` off. Written for verl 0.9.1: its engine for FSDP calls
`verl.models.transformers.monkey_patch.apply_monkey_patch` with each model, before it adds adapters and shards it. The
other engines do not call it, and their models stay as they are.
"""

import functools
from typing import Any

from tigon.integrations.frameworks import is_known_version, patch_model, replace_function

__all__ = ["register"]

# The modules that hold this function. The last one may be imported before or after this module.
NAME = "apply_monkey_patch"
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

    return apply_monkey_patch


def register() -> None:
    """Let verl patch its models with Tigon. With another version of verl, warn once and change nothing."""
    if is_known_version("verl", "0.9.1", "tigon.integrations.verl"):
        replace_function(NAME, OWNERS, _wrap)


register()
