"""The names of `liger_kernel.chunked_loss`: a table of the losses as modules, functions and autograd functions.

Each autograd function has an `apply` only, and is final: a subclass with a loss function of its own derives from the
base class.
"""

from typing import Any, NoReturn

from tigon.integrations.liger import losses, policy
from tigon.integrations.liger.functional import check_temperature
from tigon.integrations.liger.signatures import autograd_function, module, serve

_PAIRS = "ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss={}, compiled=True"
_REFERENCE = "ref_input=None, ref_weight=None, ref_bias=None"
_HEADS = (
    "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None"
)
_WEIGHTS = "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5"
_POLICY_TENSORS = (
    "selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, old_per_token_logps=None, "
    + _REFERENCE
)
_SAPO = "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05"
_VESPO = "vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0"
_DISTILLATION = (
    f"{_WEIGHTS}, ignore_index=-100, temperature=1.0, compiled=True, chunk_size=1024, return_soft_hard_loss=False"
)


_check_distillation = lambda loss: check_temperature(type(loss).__name__, loss.temperature)

# The function, the parameters of the module's constructor and forward and of `apply`, and a check of the options.
_LOSSES: dict[str, tuple] = {
    "CPO": (
        losses.cpo, f"{_PAIRS.format(True)}, average_log_prob=False, chunk_size=1",
        "lin_weight, _input, target, bias=None",
        f"_input, weight, target, bias=None, {_PAIRS.format(True)}, average_log_prob=False, chunk_size=1",
    ),
    "SimPO": (
        losses.simpo, f"{_PAIRS.format(True)}, gamma=0.5, chunk_size=1", "lin_weight, _input, target, bias=None",
        f"_input, weight, target, bias=None, {_PAIRS.format(False)}, gamma=0.5, chunk_size=1",
    ),
    "ORPO": (
        losses.orpo, "ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1",
        "lin_weight, _input, target, bias=None, nll_target=None",
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, "
        "compiled=True, chunk_size=1",
    ),
    "DPO": (
        losses.dpo,
        "ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True, "
        "average_log_prob=False, chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05",
        f"lin_weight, _input, target, bias=None, {_REFERENCE}",
        f"_input, weight, target, bias=None, {_REFERENCE}, ignore_index=-100, beta=0.1, compute_nll_loss=False, "
        "compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, loss_type='sigmoid', "
        "label_smoothing=0.0, discopop_tau=0.05, alpha=1.0",
        lambda loss: losses.check_dpo(loss.loss_type, loss.label_smoothing),
    ),
    "KTO": (
        losses.kto,
        "ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False, chunk_size=1",
        f"_input, lin_weight, target, bias=None, preference_labels=None, {_REFERENCE}, kl=None",
        f"_input, weight, target, preference_labels, bias=None, {_REFERENCE}, kl=None, ignore_index=-100, beta=0.1, "
        "compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1",
    ),
    "GRPO": (
        policy.grpo,
        "beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2, "
        f"loss_type='dapo', max_completion_length=None, importance_sampling_level='token', {_SAPO}, temperature=1.0, "
        f"delta=None, use_bias_correction_kl=False, {_VESPO}",
        f"_input, lin_weight, {_POLICY_TENSORS}, vllm_is_ratio=None, num_items_in_batch=None",
        f"_input, weight, {_POLICY_TENSORS}, beta=0.04, epsilon_low=0.2, epsilon_high=0.2, loss_type='dapo', "
        f"max_completion_length=None, importance_sampling_level='token', {_SAPO}, temperature=1.0, compiled=True, "
        f"use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, {_VESPO}, "
        "num_items_in_batch=None",
        policy.check_grpo,
    ),
    "JSD": (losses.jsd, _DISTILLATION, _HEADS, f"{_HEADS}, {_DISTILLATION}", _check_distillation),
    "CosineSimilarity": (losses.cosine, _DISTILLATION, _HEADS, f"{_HEADS}, {_DISTILLATION}", _check_distillation),
}  # fmt: skip
# The base class of each autograd function, which a subclass derives from, if it is served.
_BASES = dict.fromkeys(_LOSSES, "Preference") | {
    "KTO": "", "GRPO": "PPO", "JSD": "Distillation", "CosineSimilarity": "Distillation",
}  # fmt: skip


def _refusal(base: str, final: str) -> classmethod:
    """Return a method that refuses subclasses, whose loss function `apply` would not call."""

    def refuse(cls: type, **options: Any) -> NoReturn:
        advice = f"derive from LigerFusedLinear{base}Base" if base else "use tigon.linear_loss"
        raise TypeError(f"{cls.__name__}: {final} cannot be subclassed; {advice}")

    return classmethod(refuse)


def _define(name: str, function: Any, constructor: str, forward: str, parameters: str, check: Any = None) -> None:
    """Define the module, the autograd function and the function of a loss."""
    class_name, function_name = f"LigerFusedLinear{name}Loss", f"LigerFusedLinear{name}Function"
    renamed = {"hidden": "_input", "weight": "lin_weight"}
    loss = module(__name__, class_name, function, constructor, forward, renamed, check)
    apply = serve("apply", function, parameters, {"hidden": "_input"})
    served = autograd_function(function_name, apply, __init_subclass__=_refusal(_BASES[name], function_name))
    short_name = name.removesuffix("Similarity").lower()
    globals().update({class_name: loss, function_name: served, f"liger_fused_linear_{short_name}": apply})


for _name, _row in _LOSSES.items():
    _define(_name, *_row)
