"""The functions of `liger_kernel.chunked_loss`: classes whose `apply` takes Liger's arguments in Liger's order.

Each `apply` calls the module of the same loss. The classes are final: a subclass with a loss function of its own
derives from the base class.
"""

import inspect
from typing import Any

from torch import nn

from tigon.integrations.liger import losses
from tigon.integrations.liger.loss_bases import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPPOBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from tigon.integrations.liger.policy import LigerFusedLinearGRPOLoss


class _Final:
    """Refuses subclasses, whose loss function `apply` would not call."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        final = [base for base in cls.__bases__ if _Final in base.__mro__ and base is not _Final]
        if final:
            raise TypeError(
                f"{cls.__name__}: {final[0].__name__} cannot be subclassed; derive from {final[0].__mro__[2].__name__}"
            )


def _apply(module: type[nn.Module], parameters: str) -> Any:
    """Return an `apply` with these parameters, which calls the module with those of its constructor and its forward.

    Its docstring names the module. The functions say `weight` for the `lin_weight` of a forward.
    """
    options, tensors = (list(inspect.signature(f).parameters)[1:] for f in (module.__init__, module.forward))
    given = inspect.signature(eval(f"lambda {parameters}: None")).parameters

    def compute(**values: Any) -> Any:
        loss = module(**{name: values[name] for name in options if name in given})
        values["lin_weight"] = values.get("weight")
        return loss(**{name: values[name] for name in tensors if name in values})

    call = eval(f"lambda {parameters}: compute({', '.join(f'{name}={name}' for name in given)})", {"compute": compute})
    call.__name__ = "apply"
    call.__doc__ = f"Return the loss and metrics of `{module.__name__}`."
    return staticmethod(call)


_REFERENCE = "ref_input=None, ref_weight=None, ref_bias=None"
_DISTILLATION = (
    "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None, "
    "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
    "chunk_size=1024, return_soft_hard_loss=False"
)


class LigerFusedLinearCPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """CPO of hidden states and a head; see `LigerFusedLinearCPOLoss`."""

    apply = _apply(
        losses.LigerFusedLinearCPOLoss,
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, "
        "compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1",
    )


class LigerFusedLinearSimPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """SimPO of hidden states and a head; see `LigerFusedLinearSimPOLoss`."""

    apply = _apply(
        losses.LigerFusedLinearSimPOLoss,
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, "
        "compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1",
    )


class LigerFusedLinearORPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """ORPO of hidden states and a head; see `LigerFusedLinearORPOLoss`."""

    apply = _apply(
        losses.LigerFusedLinearORPOLoss,
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, "
        "compiled=True, chunk_size=1",
    )


class LigerFusedLinearDPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """DPO of hidden states and a head; see `LigerFusedLinearDPOLoss`."""

    apply = _apply(
        losses.LigerFusedLinearDPOLoss,
        f"_input, weight, target, bias=None, {_REFERENCE}, ignore_index=-100, beta=0.1, compute_nll_loss=False, "
        "compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, loss_type='sigmoid', "
        "label_smoothing=0.0, discopop_tau=0.05, alpha=1.0",
    )


class LigerFusedLinearKTOFunction(_Final, LigerFusedLinearUnpairedPreferenceBase):
    """KTO of hidden states and a head; see `LigerFusedLinearKTOLoss`."""

    apply = _apply(
        losses.LigerFusedLinearKTOLoss,
        f"_input, weight, target, preference_labels, bias=None, {_REFERENCE}, kl=None, ignore_index=-100, beta=0.1, "
        "compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1",
    )


class LigerFusedLinearGRPOFunction(_Final, LigerFusedLinearPPOBase):
    """GRPO of hidden states and a head; see `LigerFusedLinearGRPOLoss`."""

    apply = _apply(
        LigerFusedLinearGRPOLoss,
        "_input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        f"old_per_token_logps=None, {_REFERENCE}, beta=0.04, epsilon_low=0.2, epsilon_high=0.2, loss_type='dapo', "
        "max_completion_length=None, importance_sampling_level='token', sapo_temperature_pos=1.0, "
        "sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True, chunk_size=1, "
        "vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, "
        "vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None",
    )


class LigerFusedLinearJSDFunction(_Final, LigerFusedLinearDistillationBase):
    """The Jensen-Shannon divergence of two heads; see `LigerFusedLinearJSDLoss`."""

    apply = _apply(losses.LigerFusedLinearJSDLoss, _DISTILLATION)


class LigerFusedLinearCosineSimilarityFunction(_Final, LigerFusedLinearDistillationBase):
    """The cosine loss of two heads; see `LigerFusedLinearCosineSimilarityLoss`."""

    apply = _apply(losses.LigerFusedLinearCosineSimilarityLoss, _DISTILLATION)


# The names of `liger_kernel.chunked_loss.functional`.
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
