"""Losses of alignment as functions of log-probabilities: preferences, policies and rewards. They need plain torch only.

Each function takes the log-probability of every token, which a fused head can compute without holding the logits. It
returns the loss and a dict of detached metrics, which never wait for the GPU: read them with `.item()` when they are
logged. The names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Type checkers see the signatures of the names that are imported when they are first used.
    from tigon.losses.kto import kto_kl, kto_loss
    from tigon.losses.pairs import bradley_terry_loss, preference_token_metrics
    from tigon.losses.policy import grpo_loss
    from tigon.losses.policy_terms import (
        entropy_threshold,
        importance_sampling_ratio,
        kl_estimate,
        off_policy_mask,
    )
    from tigon.losses.ppo import ppo_loss, ppo_value_loss, rloo_loss
    from tigon.losses.preference import dpo_loss
    from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
    from tigon.losses.sequences import batch_counts, sequence_log_probs

_NAMES = {
    "kto": ("kto_kl", "kto_loss"),
    "pairs": ("bradley_terry_loss", "preference_token_metrics"),
    "policy": ("grpo_loss",),
    "policy_terms": ("entropy_threshold", "importance_sampling_ratio", "kl_estimate", "off_policy_mask"),
    "ppo": ("ppo_loss", "ppo_value_loss", "rloo_loss"),
    "preference": ("dpo_loss",),
    "reference_free": ("cpo_loss", "orpo_loss", "simpo_loss"),
    "sequences": ("batch_counts", "sequence_log_probs"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "batch_counts",
    "bradley_terry_loss",
    "cpo_loss",
    "dpo_loss",
    "entropy_threshold",
    "grpo_loss",
    "importance_sampling_ratio",
    "kl_estimate",
    "kto_kl",
    "kto_loss",
    "off_policy_mask",
    "orpo_loss",
    "ppo_loss",
    "ppo_value_loss",
    "preference_token_metrics",
    "rloo_loss",
    "sequence_log_probs",
    "simpo_loss",
]


def __getattr__(name: str) -> Any:
    """Import the module of a loss when its name is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
