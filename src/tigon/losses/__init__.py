"""Losses of alignment as functions of log-probabilities: preferences, policies and rewards. They need plain torch only.

Each function takes the log-probability of every token, which a fused head can compute without holding the logits. It
returns the loss and a dict of detached metrics, which never wait for the GPU: read them with `.item()` when they are
logged.

A wrong dtype or type raises a TypeError. A ValueError says that a shape or a device is wrong, that sequences which
should be pairs are odd in number, that `loss_type` or another choice is unknown, that an option is out of its range or
does not go with `loss_type`, or that an option needs a tensor which is None.
"""

from tigon.losses.kto import kto_kl, kto_loss
from tigon.losses.pairs import bradley_terry_loss, preference_token_metrics
from tigon.losses.policy import grpo_loss
from tigon.losses.policy_terms import entropy_threshold, importance_sampling_ratio, kl_estimate, off_policy_mask
from tigon.losses.ppo import ppo_loss, ppo_value_loss, rloo_loss
from tigon.losses.preference import dpo_loss
from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from tigon.losses.sequences import batch_counts, sequence_log_probs

__all__ = [
    "batch_counts", "bradley_terry_loss", "cpo_loss", "dpo_loss", "entropy_threshold", "grpo_loss",
    "importance_sampling_ratio", "kl_estimate", "kto_kl", "kto_loss", "off_policy_mask", "orpo_loss", "ppo_loss",
    "ppo_value_loss", "preference_token_metrics", "rloo_loss", "sequence_log_probs", "simpo_loss",
]  # fmt: skip
