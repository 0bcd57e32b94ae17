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
    from tigon.losses.policy import grpo_loss, ppo_loss, ppo_value_loss, rloo_loss
    from tigon.losses.policy_terms import (
        entropy_threshold,
        importance_sampling_ratio,
        kl_estimate,
        off_policy_mask,
    )
    from tigon.losses.preference import bradley_terry_loss, dpo_loss, preference_token_metrics
    from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
    from tigon.losses.sequences import batch_counts, sequence_log_probs

_MODULES = {
    "batch_counts": "sequences",
    "bradley_terry_loss": "preference",
    "cpo_loss": "reference_free",
    "dpo_loss": "preference",
    "entropy_threshold": "policy_terms",
    "grpo_loss": "policy",
    "importance_sampling_ratio": "policy_terms",
    "kl_estimate": "policy_terms",
    "kto_kl": "kto",
    "kto_loss": "kto",
    "off_policy_mask": "policy_terms",
    "orpo_loss": "reference_free",
    "ppo_loss": "policy",
    "ppo_value_loss": "policy",
    "preference_token_metrics": "preference",
    "rloo_loss": "policy",
    "sequence_log_probs": "sequences",
    "simpo_loss": "reference_free",
}

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
