"""Calls of the losses of alignment and distillation that Liger and TRL have, for a case.

A loader raises `ImportError` if its package is not installed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from benchmarks.ops.cases import Case
from benchmarks.ops.peers import Run, Unsupported, refuse_other_options


def _options(case: Case) -> dict[str, Any]:
    refuse_other_options(case)
    return dict(case.workload.bench_options)


def _dpo(case: Case) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(**_options(case))

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> tuple[Tensor]:
        return (loss(weight, hidden, targets, ref_input=ref_hidden, ref_weight=ref_weight)[0],)

    return run


def _orpo(case: Case) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

    loss = LigerFusedLinearORPOLoss(**_options(case))
    return lambda hidden, weight, targets: (loss(weight, hidden, targets)[0],)


def _simpo(case: Case) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearSimPOLoss

    # By default it adds the NLL of the chosen completions.
    loss = LigerFusedLinearSimPOLoss(**_options(case), compute_nll_loss=False)
    return lambda hidden, weight, targets: (loss(weight, hidden, targets)[0],)


def _kto(case: Case) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    loss = LigerFusedLinearKTOLoss(**_options(case), use_ref_model=True)

    def run(
        hidden: Tensor, weight: Tensor, targets: Tensor, labels: Tensor, ref_hidden: Tensor, ref_weight: Tensor,
        kl: Tensor,
    ) -> tuple[Tensor]:  # fmt: skip
        result = loss(
            hidden, weight, targets, preference_labels=labels, ref_input=ref_hidden, ref_weight=ref_weight,
            kl=kl.expand(len(labels)),
        )  # fmt: skip
        return (result[0],)

    return run


def _grpo(case: Case) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    options = {name: value for name, value in _options(case).items() if name != "use_bias_correction_kl"}
    loss = LigerFusedLinearGRPOLoss(**options)

    def run(
        hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, old_log_probs: Tensor,
        ref_log_probs: Tensor,
    ) -> tuple[Tensor]:  # fmt: skip
        # It takes a mask in place of ignored targets.
        result = loss(
            hidden, weight, targets.clamp(min=0), (targets != -100).to(ref_log_probs.dtype), advantages,
            ref_per_token_logps=ref_log_probs, old_per_token_logps=old_log_probs,
        )  # fmt: skip
        return (result[0],)

    return run


def liger_linear_distillation(case: Case) -> Run:
    """Load Liger's fused Jensen-Shannon divergence of two heads."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    refuse_other_options(case, "beta", "temperature", "fp32_logits")
    beta, temperature = case.options.get("beta", 0.5), case.options.get("temperature", 1.0)
    loss = LigerFusedLinearJSD(jsd_beta=beta, ignore_index=-100, temperature=temperature)

    def run(
        hidden: Tensor, weight: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> tuple[Tensor]:
        return (loss(hidden, weight, teacher_hidden, teacher_weight, targets),)

    return run


def trl_linear_distillation(case: Case) -> Run:
    """Load the divergence of TRL's distillation trainer; as there, only the valid positions are computed."""
    module = import_module("trl.trainer.distillation_trainer")
    if not hasattr(module, "ChunkedDivergenceFunction"):
        raise Unsupported("this version of TRL has no trl.trainer.distillation_trainer.ChunkedDivergenceFunction")
    function = module.ChunkedDivergenceFunction
    refuse_other_options(case, "beta", "temperature", "fp32_logits")
    beta, temperature = case.options.get("beta", 0.5), case.options.get("temperature", 1.0)

    def run(
        hidden: Tensor, weight: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> tuple[Tensor]:
        valid = targets != -100
        divergence, _ = function.apply(
            hidden[valid], weight, None, teacher_hidden[valid], teacher_weight, None, beta, temperature,
            1.0, None, 1.0, None,
        )  # fmt: skip
        return (divergence.sum() / valid.sum().clamp(min=1),)

    return run


LIGER: dict[str, Callable[[Case], Run]] = {
    "dpo_loss": _dpo,
    "orpo_loss": _orpo,
    "simpo_loss": _simpo,
    "kto_loss": _kto,
    "grpo_loss": _grpo,
}
