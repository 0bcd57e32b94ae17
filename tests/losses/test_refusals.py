"""Bad arguments raise an error that names the function, the argument, the rule and the value."""

import re

import pytest
import torch

from losses.cases import tokens
from losses.loss_calls import CALLS, POLICY_CALLS
from tigon import losses

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

X = tokens(4, 3)
MASK = X.mask
LOG_PROBS, REFERENCE = X.log_probs(), X.log_probs("reference")
ADVANTAGES = X.per_sequence("advantages")
ENTROPY = X.normal("entropy").abs()
BOOL = torch.ones(4, dtype=torch.bool)
DPO = {"log_probs": LOG_PROBS, "mask": MASK, "ref_log_probs": REFERENCE}
PAIR = {"log_probs": LOG_PROBS, "mask": MASK}
KTO = PAIR | {"is_desirable": BOOL}
POLICY = PAIR | {"advantages": ADVANTAGES}
SAMPLING = PAIR | {"sampling_log_probs": REFERENCE}

# A function, its good arguments, the bad ones, and the message.
CASES = [
    ("dpo_loss", DPO, {"log_probs": LOG_PROBS[:3], "mask": MASK[:3], "ref_log_probs": None},
     "log_probs must have an even number of sequences, the chosen ones and then the rejected ones, got 3"),
    ("dpo_loss", DPO, {"ref_log_probs": REFERENCE[:2]}, "ref_log_probs must have shape (4, 3), got (2, 3)"),
    ("dpo_loss", DPO, {"ref_log_probs": REFERENCE.double()},
     "log_probs and ref_log_probs must have the same dtype, got log_probs torch.float32, ref_log_probs torch.float64"),
    ("dpo_loss", DPO, {"loss_type": "simgoid"}, "loss_type must be one of 'sigmoid', 'hinge', "),
    ("dpo_loss", DPO, {"loss_type": ["sigmoid", 3]}, "loss_type must be one of 'sigmoid', 'hinge', "),
    ("dpo_loss", DPO, {"loss_type": []}, "loss_type must be a string or a list of strings, got []"),
    ("dpo_loss", DPO, {"loss_type": 3}, "loss_type must be a string or a list of strings, got 3"),
    ("dpo_loss", DPO, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]},
     "loss_weights must be a list of 2 numbers, one for each of loss_type ['sigmoid', 'sft'], got [1.0]"),
    ("dpo_loss", DPO, {"loss_weights": 1.0}, "loss_weights must be a list of 1 numbers"),
    ("dpo_loss", DPO, {"loss_weights": ["a"]}, "loss_weights must be a number, got str"),
    ("dpo_loss", DPO, {"beta": 0.0}, "beta must be positive and finite, got 0.0"),
    ("dpo_loss", DPO, {"beta": torch.tensor(0.1)}, "beta must be a number, got Tensor"),
    ("dpo_loss", DPO, {"label_smoothing": 0.1}, "label_smoothing must be 0 for loss_type 'sigmoid', got 0.1; only "),
    ("dpo_loss", DPO, {"loss_type": "robust", "label_smoothing": 0.5},
     "label_smoothing must be below 0.5 for loss_type 'robust', got 0.5"),
    ("dpo_loss", DPO, {"loss_type": "exo_pair"}, "label_smoothing must be in (0, 1) for loss_type 'exo_pair', got 0"),
    ("dpo_loss", DPO, {"loss_type": "aot", "label_smoothing": 1.5}, "label_smoothing must be in [0, 1], got 1.5"),
    ("dpo_loss", DPO, {"f_divergence_type": "kl"}, "f_divergence_type must be one of 'reverse_kl', 'forward_kl', "),
    ("dpo_loss", DPO, {"loss_type": ["sft", "aot"], "f_divergence_type": "forward_kl"},
     "f_divergence_type must be 'reverse_kl' for loss_type 'aot', got 'forward_kl'"),
    ("dpo_loss", DPO, {"discopop_tau": -1.0}, "discopop_tau must be positive and finite, got -1.0"),
    ("dpo_loss", DPO, {"ld_alpha": 1.1}, "ld_alpha must be in [0, 1], got 1.1"),
    ("dpo_loss", DPO, {"use_weighting": 1}, "use_weighting must be a bool, got 1"),
    ("dpo_loss", DPO, {"use_weighting": True},
     "log_sum_sq_probs must be a tensor if use_weighting is True, got None"),
    ("dpo_loss", DPO, {"use_weighting": True, "log_sum_sq_probs": REFERENCE, "loss_type": ["sigmoid", "aot"]},
     "use_weighting must be False for loss_type 'aot', which sorts the pairs"),
    ("dpo_loss", DPO, {"part_of": (4, 12, 6)},
     "part_of must be the result of batch_counts or None, got (4, 12, 6)"),
    ("dpo_loss", DPO, {"loss_type": "aot", "part_of": losses.batch_counts(MASK)},
     "part_of must be None for loss_type 'aot' with use_weighting=False, whose loss of a batch is not a sum over"),
    ("batch_counts", {"mask": MASK}, {"mask": MASK[0]},
     "the mask must have shape [N, L] without cu_seqlens, got (3,)"),
    ("grpo_loss", POLICY, {"part_of": losses.batch_counts(MASK), "entropy": ENTROPY, "top_entropy_quantile": 0.5},
     "part_of must be None if tokens are selected by the entropies of the whole batch"),
    ("dpo_loss", DPO, {"ref_sequence_log_probs": ADVANTAGES},
     "only one of ref_log_probs and ref_sequence_log_probs can be given, got both"),
    ("dpo_loss", PAIR, {"ref_sequence_log_probs": ADVANTAGES[:2]},
     "ref_sequence_log_probs must have shape (4,), got (2,)"),
    ("preference_token_metrics", {"mask": MASK}, {"entropy": ENTROPY[:, :2]},
     "entropy must have shape (4, 3), got (4, 2)"),
    ("preference_token_metrics", {"mask": MASK}, {"is_top1": ENTROPY},
     "is_top1 must be a bool tensor, got torch.float32"),
    ("preference_token_metrics", {"mask": MASK}, {"is_chosen": BOOL[:3]}, "is_chosen must have shape (4,), got (3,)"),
    ("bradley_terry_loss", {"rewards": ADVANTAGES}, {"rewards": ADVANTAGES[:3]},
     "rewards must have shape [2P], chosen and then rejected, got (3,)"),
    ("bradley_terry_loss", {"rewards": ADVANTAGES}, {"margin": ADVANTAGES}, "margin must have shape (2,), got (4,)"),
    ("bradley_terry_loss", {"rewards": ADVANTAGES}, {"center_rewards_coefficient": -1.0},
     "center_rewards_coefficient must be finite and not negative, got -1.0"),
    ("orpo_loss", PAIR, {"nll_mask": MASK[:2]}, "nll_mask must have shape (4, 3), got (2, 3)"),
    ("orpo_loss", PAIR, {"nll_mask": LOG_PROBS}, "nll_mask must be a bool tensor, got torch.float32"),
    ("orpo_loss", PAIR, {"beta": -0.1}, "beta must be finite and not negative, got -0.1"),
    ("cpo_loss", PAIR, {"loss_type": "dpo"}, "loss_type must be one of 'sigmoid', 'hinge', 'ipo', 'simpo', 'alphapo'"),
    ("cpo_loss", PAIR, {"loss_type": "ipo", "label_smoothing": 0.1},
     "label_smoothing must be 0 for loss_type 'ipo', got 0.1"),
    ("cpo_loss", PAIR, {"simpo_gamma": float("nan")}, "simpo_gamma must be finite, got nan"),
    ("simpo_loss", PAIR, {"gamma": None}, "gamma must be a number, got NoneType"),
    ("simpo_loss", PAIR, {"log_probs": LOG_PROBS[:1], "mask": MASK[:1]},
     "log_probs must have an even number of sequences"),
    ("kto_kl", PAIR, {"ref_log_probs": REFERENCE[:, :1]}, "ref_log_probs must have shape (4, 3), got (4, 1)"),
    ("kto_loss", KTO, {"is_desirable": BOOL[:2]}, "is_desirable must have shape (4,), got (2,)"),
    ("kto_loss", KTO, {"is_desirable": ADVANTAGES}, "is_desirable must be a bool tensor, got torch.float32"),
    ("kto_loss", KTO, {"kl": ADVANTAGES}, "kl must have shape (), got (4,)"),
    ("kto_loss", KTO, {"kl": 0.1}, "kl must be a Tensor, got float"),
    ("kto_loss", KTO, {"kl": torch.tensor(0.1), "loss_type": "apo_zero_unpaired"},
     "kl must be None for loss_type 'apo_zero_unpaired', got a Tensor"),
    ("kto_loss", KTO, {"loss_type": "bco"}, "loss_type must be one of 'kto', 'apo_zero_unpaired', got 'bco'"),
    ("kto_loss", KTO, {"undesirable_weight": -1}, "undesirable_weight must be finite and not negative, got -1"),
    ("kl_estimate", {"log_probs": LOG_PROBS, "ref_log_probs": REFERENCE}, {"estimator": "k4"},
     "estimator must be one of 'k1', 'k2', 'k3', got 'k4'"),
    ("kl_estimate", {"log_probs": LOG_PROBS, "ref_log_probs": REFERENCE}, {"ref_log_probs": REFERENCE[0]},
     "ref_log_probs must have shape (4, 3), got (3,)"),
    ("entropy_threshold", {"entropy": ENTROPY, "mask": MASK, "quantile": 0.5}, {"quantile": 1.5},
     "quantile must be in [0, 1], got 1.5"),
    ("entropy_threshold", {"entropy": ENTROPY, "mask": MASK, "quantile": 0.5}, {"mask": MASK[0]},
     "mask must have shape (4, 3), got (3,)"),
    ("off_policy_mask", SAMPLING | {"advantages": ADVANTAGES, "threshold": 0.1}, {"threshold": float("inf")},
     "threshold must be finite, got inf"),
    ("importance_sampling_ratio", SAMPLING, {"mode": "truncate"},
     "mode must be one of 'token_truncate', 'token_mask', "),
    ("importance_sampling_ratio", SAMPLING, {"clip_min": 3.0}, "clip_min must be below clip_max, got 3 and 3"),
    ("importance_sampling_ratio", SAMPLING, {"clip_min": -1.0}, "clip_min must be finite and not negative, got -1.0"),
    ("importance_sampling_ratio", SAMPLING, {"mode": "token_truncate", "clip_max": None},
     "clip_min or clip_max must be a number for mode 'token_truncate', got None for both"),
    ("grpo_loss", POLICY, {"loss_type": "ppo"}, "loss_type must be one of 'grpo', 'bnpo', "),
    ("grpo_loss", POLICY, {"advantages": ADVANTAGES[:3]}, "advantages must have shape (4,) or (4, 3), got (3,)"),
    ("grpo_loss", POLICY, {"advantages": ADVANTAGES[:, None]}, "advantages must have shape (4,) or (4, 3), got (4, 1)"),
    ("grpo_loss", POLICY, {"advantages": BOOL},
     "advantages must be a float32, bfloat16 or float16 tensor, got torch.bool"),
    ("grpo_loss", POLICY, {"importance_sampling_level": "group"},
     "importance_sampling_level must be one of 'token', 'sequence', None, got 'group'"),
    ("grpo_loss", POLICY, {"epsilon": -0.1}, "epsilon must be finite and not negative, got -0.1"),
    ("grpo_loss", POLICY, {"epsilon_high": "a"}, "epsilon_high must be a number, got str"),
    ("grpo_loss", POLICY, {"delta": 0.0}, "delta must be positive and finite, got 0.0"),
    ("grpo_loss", POLICY, {"delta": 2.0, "loss_type": "sapo"}, "delta must be None for loss_type 'sapo', got 2"),
    ("grpo_loss", POLICY, {"loss_type": "cispo"}, "epsilon_high must be a number for loss_type 'cispo', got None"),
    ("grpo_loss", POLICY, {"beta": 0.1}, "ref_log_probs must be a tensor if beta is 0.1, got None"),
    ("grpo_loss", POLICY, {"kl_estimator": "k0"}, "kl_estimator must be one of 'k1', 'k2', 'k3', got 'k0'"),
    ("grpo_loss", POLICY, {"use_bias_correction_kl": "no"}, "use_bias_correction_kl must be a bool, got 'no'"),
    ("grpo_loss", POLICY, {"sapo_temperature_pos": 0}, "sapo_temperature_pos must be positive and finite, got 0"),
    ("grpo_loss", POLICY, {"vespo_k_neg": -1.0}, "vespo_k_neg must be finite and not negative, got -1.0"),
    ("grpo_loss", POLICY, {"entropy": ENTROPY[:2]}, "entropy must have shape (4, 3), got (2, 3)"),
    ("grpo_loss", POLICY, {"entropy_coef": 0.1}, "entropy must be a tensor if entropy_coef is 0.1, got None"),
    ("grpo_loss", POLICY, {"top_entropy_quantile": 0.2},
     "entropy must be a tensor if tokens are selected by their entropy, got None"),
    ("grpo_loss", POLICY, {"top_entropy_quantile": 1.2}, "top_entropy_quantile must be in [0, 1], got 1.2"),
    ("grpo_loss", POLICY, {"top_entropy_threshold": ADVANTAGES, "entropy": ENTROPY},
     "top_entropy_threshold must have shape (), got (4,)"),
    ("grpo_loss", POLICY, {"importance_sampling_ratio": ADVANTAGES[:2]},
     "importance_sampling_ratio must have shape (4,) or (4, 3), got (2,)"),
    ("grpo_loss", POLICY, {"importance_sampling_ratio": ADVANTAGES, "loss_type": "vespo"},
     "importance_sampling_ratio must have shape (4, 3), got (4,)"),
    ("grpo_loss", POLICY, {"off_policy_mask_threshold": "a"}, "off_policy_mask_threshold must be a number, got str"),
    ("grpo_loss", POLICY, {"num_items_in_batch": -1}, "num_items_in_batch must be finite and not negative, got -1"),
    ("grpo_loss", POLICY, {"num_items_in_batch": ADVANTAGES}, "num_items_in_batch must have shape (), got (4,)"),
    ("grpo_loss", POLICY, {"num_items_in_batch": 5, "loss_type": "grpo"},
     "num_items_in_batch must be None for loss_type 'grpo', got 5"),
    ("grpo_loss", POLICY, {"loss_type": "dr_grpo"},
     "max_completion_length must be an int for loss_type 'dr_grpo', got None"),
    ("grpo_loss", POLICY, {"loss_type": "dr_grpo", "max_completion_length": 0},
     "max_completion_length must be positive and fit into 64 bits, got 0"),
    ("grpo_loss", POLICY, {"max_completion_length": 9},
     "max_completion_length must be None for loss_type 'dapo', got 9"),
    ("rloo_loss", POLICY, {"advantages": LOG_PROBS}, "advantages must have shape (4,), got (4, 3)"),
    ("rloo_loss", POLICY, {"old_log_probs": ADVANTAGES}, "old_log_probs must have shape (4, 3), got (4,)"),
    ("ppo_loss", POLICY, {"epsilon": None}, "epsilon must be a number, got NoneType"),
    ("ppo_value_loss", {"values": LOG_PROBS, "returns": REFERENCE, "mask": MASK}, {"values": LOG_PROBS[0]},
     "values must have shape [N, L] without cu_seqlens, got (3,)"),
    ("sequence_log_probs", PAIR, {"average": 0}, "average must be a bool, got 0"),
    ("sequence_log_probs", PAIR, {"cu_seqlens": torch.tensor([0, 2])},
     "log_probs must have shape [T] with cu_seqlens, got (4, 3)"),
    ("sequence_log_probs", PAIR, {"cu_seqlens": torch.zeros(0, dtype=torch.int64)},
     "cu_seqlens must have shape [N + 1], got (0,)"),
    ("sequence_log_probs", PAIR, {"cu_seqlens": ADVANTAGES},
     "cu_seqlens must be an int64 or int32 tensor, got torch.float32"),
]  # fmt: skip


IDS = [f"{name}-{'-'.join(bad)}-{i}" for i, (name, _, bad, _) in enumerate(CASES)]


@pytest.mark.parametrize(("name", "good", "bad", "message"), CASES, ids=IDS)
def test_a_bad_argument_is_named(name, good, bad, message):
    function = getattr(losses, name)
    function(**good)
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(f"{name}: {message}")):
        function(**good | bad)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_masks_and_log_probabilities_of_other_shapes_and_dtypes(call):
    arguments = call.arguments(tokens(4, 3))
    name = next(iter(arguments))
    op = call.loss.__name__
    x, mask = arguments[name], arguments["mask"]
    refusals = [
        ({"mask": mask[:, :2]}, rf"^{op}: mask must have shape \(4, 3\), got \(4, 2\)$"),
        ({"mask": mask.long()}, rf"^{op}: mask must be a bool tensor, got torch.int64$"),
        ({"mask": None}, rf"^{op}: mask must be a Tensor, got NoneType$"),
        ({name: x.bfloat16()}, rf"^{op}: {name} must be a float32 tensor, got torch.bfloat16$"),
        ({name: x[0], "mask": mask[0]}, rf"^{op}: {name} must have shape \[N, L\] without cu_seqlens, got \(3,\)$"),
        ({name: x.tolist()}, rf"^{op}: {name} must be a Tensor, got list$"),
        ({name: x.to("meta")}, rf"^{op}: {name} and mask.* must have the same device, got {name} meta, mask cpu"),
    ]
    for bad, message in refusals:
        with pytest.raises((TypeError, ValueError), match=message):
            call(arguments | bad)


@pytest.mark.parametrize("call", POLICY_CALLS, ids=lambda call: call.name)
def test_tokens_of_the_old_policy_have_the_shape_of_the_tokens(call):
    arguments = call.arguments(tokens(4, 3))
    old = [name for name in arguments if name.startswith("old")]
    assert len(old) == 1
    message = rf"^{call.loss.__name__}: {old[0]} must have shape \(4, 3\), got \(4, 1\)$"
    with pytest.raises(ValueError, match=message):
        call(arguments | {old[0]: arguments[old[0]][:, :1]})
