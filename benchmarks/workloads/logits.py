"""Workloads of the ops on logits of one model. Sizes: M rows, N columns; T tokens, V vocabulary."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads.inputs import InputMaker, Inputs, rows
from benchmarks.workloads.workload import FIRST_ROOFLINE, ROOFLINE, Case, Variant, Workload, small, sweep
from tigon.ops.logits.cross_entropy import cross_entropy_reference, log_probs_and_entropy_reference
from tigon.ops.logits.softmax import softmax_reference

WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768)
VOCABULARIES = (32000, 50304, 128256, 151936, 256000)

# Two of seven targets are -100.
IGNORED = {"ignored": 2 / 7}
CLASS_WEIGHT = {"class_weight": True}
SMOOTHED = {"z_loss": 0.01, "label_smoothing": 0.1}
EVERY_TERM = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}
EVERY_OPTION = {**EVERY_TERM, "return_predicted_tokens": True}
TOKEN_OUTPUTS = {"return_log_probs": True, "return_entropy": True}


def _cross_entropy(make: InputMaker) -> Inputs:
    """Make logits and targets; form: with `class_weight` also the weights of the classes."""
    t, v = make.sizes
    targets = make.targets(t, v)
    tensors = {"input": make.logits(t, v, targets).requires_grad_(), "target": targets}
    if make.form.get("class_weight"):
        tensors["weight"] = torch.ones(v, device=make.device)
    return Inputs(tensors)


def token_results(logits: Tensor, target: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the results for each token that the options request: log-probabilities and entropies, [T] each."""
    requests = [bool(options.get(name)) for name in TOKEN_OUTPUTS]
    results = log_probs_and_entropy_reference(logits, target) if any(requests) else ()
    return tuple(result for result, is_requested in zip(results, requests, strict=False) if is_requested)


def loss_reference(input: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return the loss of logits and the results for each token that are requested."""
    others = {name: value for name, value in options.items() if name not in (*TOKEN_OUTPUTS, "inplace")}
    return cross_entropy_reference(input, target, **others), *token_results(input, target, options)


WORKLOADS = (
    Workload(
        name="softmax",
        reference=softmax_reference,
        any_shape=("x",),
        inputs=rows,
        legend="M x N",
        test_variants=(Variant("", (7, 48)), Variant("of another dimension", (3, 5, 16), {"dim": 1})),
        compile_variants=(Variant("128", (64, 128)), *(Variant(f"{n}", (2, n)) for n in (4096, 16384, 32000))),
        elements=lambda m, n: 5 * m * n,
        bench_shapes=(
            # These are the scores of attention over 4096 keys.
            Case("llama-3-8b", (16384, 4096), ROOFLINE),
            small(512, 1024),
            *sweep((4096, n) for n in WIDTHS),
        ),
    ),
    Workload(
        name="cross_entropy",
        reference=loss_reference,
        inputs=_cross_entropy,
        legend="T x V",
        is_loss=True,
        has_cpu_code=True,
        test_variants=(
            Variant("", (7, 100), form=IGNORED),
            Variant("none", (7, 100), SMOOTHED | {"reduction": "none", "softcap": 5.0}, IGNORED),
            Variant("token scaling", (7, 100), SMOOTHED | {"token_scaling": True}, IGNORED),
            Variant("with log-probabilities and entropy", (7, 100), TOKEN_OUTPUTS, IGNORED),
        ),
        compile_variants=(
            Variant("32000 in place", (2, 32000), {"inplace": True}),
            Variant("of one class", (2, 1), {"inplace": True}),
            Variant("32000", (2, 32000)),
            Variant("128256", (2, 128256)),
            Variant("128256 in place", (2, 128256), {"inplace": True}),
            Variant("128256 in place, token scaling", (2, 128256), {"inplace": True, "token_scaling": True}),
            Variant("256000, every option", (2, 256000), EVERY_OPTION, CLASS_WEIGHT),
            Variant("128256, token scaling", (2, 128256), {"token_scaling": True}),
            Variant("128256, log-probabilities and entropy", (2, 128256), TOKEN_OUTPUTS),
            Variant(
                "256000, every option and output",
                (2, 256000),
                {"token_scaling": True, **EVERY_OPTION, **TOKEN_OUTPUTS},
                CLASS_WEIGHT,
            ),
        ),
        # The logits are read once and the gradient is written once: a row stays on the chip. A kernel that reads the
        # logits twice reaches 67 % of this floor.
        elements=lambda t, v: 2 * t * v,
        bench_shapes=(
            Case("llama-3-8b", (8192, 128256), FIRST_ROOFLINE),
            small(512, 16384),
            *sweep((4096, v) for v in VOCABULARIES),
        ),
    ),
)
