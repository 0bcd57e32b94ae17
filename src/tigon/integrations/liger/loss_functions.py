"""The functions of `liger_kernel.chunked_loss`: classes whose `apply` takes Liger's arguments in Liger's order.

Each `apply` calls the module of the same loss. The classes are final: a subclass with a loss function of its own
derives from the base class.
"""

from typing import Any

from torch import Tensor

from tigon.integrations.liger import losses
from tigon.integrations.liger.loss_bases import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPPOBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from tigon.integrations.liger.policy import LigerFusedLinearGRPOLoss

__all__ = [
    "LigerFusedLinearCPOFunction", "LigerFusedLinearCosineSimilarityFunction", "LigerFusedLinearDPOFunction",
    "LigerFusedLinearGRPOFunction", "LigerFusedLinearJSDFunction", "LigerFusedLinearKTOFunction",
    "LigerFusedLinearORPOFunction", "LigerFusedLinearSimPOFunction", "liger_fused_linear_cosine",
    "liger_fused_linear_cpo", "liger_fused_linear_dpo", "liger_fused_linear_grpo", "liger_fused_linear_jsd",
    "liger_fused_linear_kto", "liger_fused_linear_orpo", "liger_fused_linear_simpo",
]  # fmt: skip


class _Final:
    """Refuses subclasses, whose loss function `apply` would not call."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        final = [base for base in cls.__bases__ if _Final in base.__mro__ and base is not _Final]
        if final:
            raise TypeError(
                f"{cls.__name__}: {final[0].__name__} cannot be subclassed; derive from {final[0].__mro__[2].__name__}"
            )


class LigerFusedLinearCPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """CPO of hidden states and a head; see `LigerFusedLinearCPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = True,
        compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> tuple:  # fmt: skip
        """Return the loss and metrics of `LigerFusedLinearCPOLoss`."""
        loss = losses.LigerFusedLinearCPOLoss(
            ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, average_log_prob, chunk_size
        )
        return loss(weight, _input, target, bias)


class LigerFusedLinearSimPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """SimPO of hidden states and a head; see `LigerFusedLinearSimPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = False,
        compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> tuple:  # fmt: skip
        """Return the loss and metrics of `LigerFusedLinearSimPOLoss`."""
        loss = losses.LigerFusedLinearSimPOLoss(
            ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, gamma, chunk_size
        )
        return loss(weight, _input, target, bias)


class LigerFusedLinearORPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """ORPO of hidden states and a head; see `LigerFusedLinearORPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
        chunk_size: int = 1,
    ) -> tuple:  # fmt: skip
        """Return the loss and metrics of `LigerFusedLinearORPOLoss`."""
        loss = losses.LigerFusedLinearORPOLoss(ignore_index, beta, compute_nll_loss, compiled, chunk_size)
        return loss(weight, _input, target, bias, nll_target)


class LigerFusedLinearDPOFunction(_Final, LigerFusedLinearPreferenceBase):
    """DPO of hidden states and a head; see `LigerFusedLinearDPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1,
        compute_nll_loss: bool = False, compiled: bool = True, use_ref_model: bool = True,
        average_log_prob: bool = False, chunk_size: int = 1, loss_type: str = "sigmoid", label_smoothing: float = 0.0,
        discopop_tau: float = 0.05, alpha: float = 1.0,
    ) -> tuple:  # fmt: skip
        """Return the loss and metrics of `LigerFusedLinearDPOLoss`."""
        loss = losses.LigerFusedLinearDPOLoss(
            ignore_index, beta, alpha, compute_nll_loss, compiled, use_ref_model, average_log_prob, chunk_size,
            loss_type, label_smoothing, discopop_tau,
        )  # fmt: skip
        return loss(weight, _input, target, bias, ref_input, ref_weight, ref_bias)


class LigerFusedLinearKTOFunction(_Final, LigerFusedLinearUnpairedPreferenceBase):
    """KTO of hidden states and a head; see `LigerFusedLinearKTOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        kl: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True,
        use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> tuple:  # fmt: skip
        """Return the loss and metrics of `LigerFusedLinearKTOLoss`."""
        loss = losses.LigerFusedLinearKTOLoss(ignore_index, beta, compiled, use_ref_model, average_log_prob, chunk_size)
        return loss(_input, weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, kl)


class LigerFusedLinearGRPOFunction(_Final, LigerFusedLinearPPOBase):
    """GRPO of hidden states and a head; see `LigerFusedLinearGRPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
        bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, beta: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple:  # fmt: skip
        """Return the loss and metrics of `LigerFusedLinearGRPOLoss`."""
        loss = LigerFusedLinearGRPOLoss(
            beta, compiled, use_ref_model, chunk_size, epsilon_low, epsilon_high, loss_type, max_completion_length,
            importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, temperature, delta,
            use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
        )  # fmt: skip
        return loss(
            _input, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio, num_items_in_batch,
        )  # fmt: skip


class _Distillation(LigerFusedLinearDistillationBase):
    """The arguments of both distillation losses, of which a subclass names the module."""

    module: Any

    @classmethod
    def apply(
        cls, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> Any:  # fmt: skip
        """Return the loss, or the loss, the divergence and the cross entropy."""
        loss = cls.module(
            weight_hard_loss, weight_soft_loss, beta, ignore_index, temperature, compiled, chunk_size,
            return_soft_hard_loss,
        )  # fmt: skip
        return loss(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias
        )


class LigerFusedLinearJSDFunction(_Final, _Distillation):
    """The Jensen-Shannon divergence of two heads; see `LigerFusedLinearJSDLoss`."""

    module = losses.LigerFusedLinearJSDLoss


class LigerFusedLinearCosineSimilarityFunction(_Final, _Distillation):
    """The cosine loss of two heads; see `LigerFusedLinearCosineSimilarityLoss`."""

    module = losses.LigerFusedLinearCosineSimilarityLoss


# The names of `liger_kernel.chunked_loss.functional`.
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
