"""Workloads of the losses of alignment from hidden states. Sizes: N sequences of L tokens, H hidden, V vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads.head import head_flops, head_inputs
from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import MORE, Case, Workload, small, sweep
from tigon.losses import dpo_loss, grpo_loss, kto_loss, orpo_loss, simpo_loss
from tigon.ops.head.linear_log_probs import linear_log_probs_reference

MODEL = (4096, 128256)
LENGTHS = (256, 512, 1024, 2048, 4096)
REFERENCE_MODEL = ("ref_hidden", "ref_weight")


def _make(names: tuple[str, ...]) -> Callable[[InputMaker], Inputs]:
    """Return the function that makes hidden states, the weight of the head, targets, and further tensors by name."""

    def make_inputs(make: InputMaker) -> Inputs:
        n, length, h, v = make.sizes
        flat = head_inputs(make, n * length, h, v)
        hidden, weight = (flat[name].detach() for name in ("input", "linear_weight"))
        tensors = {
            "hidden": hidden.view(n, length, h).requires_grad_(), "weight": weight.requires_grad_(),
            "targets": flat["target"].view(n, length),
        }  # fmt: skip
        fp32 = lambda *shape: make.normal(*shape, dtype=torch.float32)
        # The log-probabilities of other policies are near those that the hidden states give.
        makers: dict[str, Callable[[], Tensor]] = {
            "ref_hidden": lambda: hidden.view(n, length, h) + 0.1 * make.normal(n, length, h),
            "ref_weight": lambda: weight.detach().clone(),
            "advantages": lambda: fp32(n),
            "old_log_probs": lambda: -fp32(n, length).abs(),
            "ref_log_probs": lambda: -fp32(n, length).abs(),
            "is_desirable": lambda: torch.arange(n, device=make.device) % 2 == 0,
            "kl": lambda: fp32(1).abs()[0],
        }
        return Inputs(tensors | {name: makers[name]() for name in names})

    return make_inputs


def _reference(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return the loss as a function of the tensors of a case, computed with all logits."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, *others: Tensor, **options: Any) -> Tensor:
        tensors: dict[str, Any] = dict(zip(names, others, strict=True))
        if "ref_hidden" in tensors:
            with torch.no_grad():
                reference = linear_log_probs_reference(tensors.pop("ref_hidden"), tensors.pop("ref_weight"), targets)
            tensors["ref_log_probs"] = reference
        log_probs = linear_log_probs_reference(hidden, weight, targets)
        loss, _ = function(log_probs=log_probs, mask=targets != -100, **tensors, **options)
        return loss

    return run


def _call(names: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return the function that calls the module with the tensors of a case."""

    def run(module: Callable[..., Any], *tensors: Tensor, **options: Any) -> Tensor:
        hidden, weight, targets, *others = tensors
        loss, _ = module(**options)(hidden, weight, targets, **dict(zip(names, others, strict=True)))
        return loss

    return run


def _workload(
    module: str, function: Callable[..., Any], options: dict[str, Any] | None = None, names: tuple[str, ...] = ()
) -> Workload:
    return Workload(
        name=function.__name__,
        function=module,
        call=_call(names),
        reference=_reference(function, names),
        inputs=_make(names),
        legend="N x L x H x V",
        rows_axis=1,
        is_loss=True,
        has_cpu_code=True,
        flops=lambda case: head_flops(case, ("hidden", "weight"), more_products="ref_hidden" in names),
        bench_options=options or {},
        bench_shapes=(
            Case("llama-3-8b", (8, 1024, *MODEL), MORE),
            Case("llama-3-8b", (8, 1024, *MODEL), MORE, ignored=0.5),
            # A pair, and a sequence, do not fit in the budget of logits.
            Case("llama-3-8b", (4, 16384, *MODEL), MORE),
            small(4, 256, 128, 16384),
            *sweep((8, length, *MODEL) for length in LENGTHS),
        ),
    )


WORKLOADS = (
    _workload("DPOLoss", dpo_loss, {"beta": 0.1}, REFERENCE_MODEL),
    _workload("ORPOLoss", orpo_loss, {"beta": 0.1}),
    _workload("SimPOLoss", simpo_loss, {"beta": 2.0, "gamma": 1.0}),
    _workload("KTOLoss", kto_loss, {"beta": 0.1}, ("is_desirable", *REFERENCE_MODEL, "kl")),
    _workload(
        "GRPOLoss",
        grpo_loss,
        {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": False},
        ("advantages", "old_log_probs", "ref_log_probs"),
    ),
)
