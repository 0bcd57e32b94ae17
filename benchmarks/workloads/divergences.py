"""Workloads of the divergences between a student and its teacher. Sizes: T tokens, V vocabulary."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.logits import IGNORED, VOCABULARIES
from benchmarks.workloads.workload import MORE, ROOFLINE, Case, Variant, Workload, small, sweep
from tigon.ops.logits.divergences import jsd_reference, kl_div_reference, tvd_reference

# The distance of a student's logits from its teacher's; their divergence is then a fraction of a nat.
DISTANCE = 0.7

Scale = Literal["logits", "log_probs", "probs"]
LABELLED = IGNORED | {"labels": True}


def _distributions(student_scale: Scale, teacher_scale: Scale) -> Callable[[InputMaker], Inputs]:
    """Return the function that makes a student's and its teacher's distributions over the vocabulary. The option
    `from_logits` makes both logits, and `log_target` makes the teacher's log-probabilities. Form: with `labels` also
    the labels of the tokens."""

    def make_inputs(make: InputMaker) -> Inputs:
        t, v = make.sizes
        targets = make.targets(t, v)
        teacher = make.logits(t, v, targets)
        student = make.normal(t, v).mul_(DISTANCE).add_(teacher)
        scales = student_scale, "log_probs" if make.options.get("log_target") else teacher_scale
        if make.options.get("from_logits"):
            scales = "logits", "logits"
        input, target = (_on_scale(scale, logits) for scale, logits in zip(scales, (student, teacher), strict=True))
        labels = {"labels": targets} if make.form.get("labels") else {}
        return Inputs({"input": input.requires_grad_(), "target": target, **labels})

    return make_inputs


def _on_scale(scale: Scale, logits: Tensor) -> Tensor:
    if scale == "logits":
        return logits
    convert = torch.log_softmax if scale == "log_probs" else torch.softmax
    return convert(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(logits.dtype)


def _elements(t: int, v: int) -> int:
    """Return the elements of both distributions, read once, and of one gradient, written once."""
    return 3 * t * v


FROM_LOGITS = {"from_logits": True}
# The sizes and properties of all divergences.
TEST_SIZES, LLAMA_3 = (7, 100), (4096, 128256)
_COMPARED = (small(256, 16384), *sweep((2048, v) for v in VOCABULARIES))
_PROPERTIES: dict[str, Any] = {"legend": "T x V", "is_loss": True, "family": "divergence", "elements": _elements}

WORKLOADS = (
    Workload(
        name="kl_div",
        reference=kl_div_reference,
        inputs=_distributions("log_probs", "probs"),
        test_variants=(
            Variant("", TEST_SIZES, {"log_target": True}, LABELLED),
            Variant("none", TEST_SIZES, {"log_target": True, "reduction": "none"}, LABELLED),
            Variant("logits", TEST_SIZES, {"from_logits": True, "temperature": 2.0}, LABELLED),
        ),
        compile_variants=(
            Variant("128256", (2, 128256), {"log_target": True}),
            Variant("32000 of probabilities", (2, 32000)),
            Variant("32000 from logits", (2, 32000), FROM_LOGITS),
        ),
        bench_options={"reduction": "batchmean"},
        bench_shapes=(
            Case("llama-3-8b", LLAMA_3, ROOFLINE), Case("llama-3-8b", LLAMA_3, MORE, {"log_target": True}), *_COMPARED,
        ),
        **_PROPERTIES,
    ),
    Workload(
        name="jsd",
        reference=jsd_reference,
        inputs=_distributions("log_probs", "log_probs"),
        # From logits the gradient is a difference of entropies.
        test_variants=(
            Variant("", TEST_SIZES, {"beta": 0.1}, LABELLED),
            Variant("logits", TEST_SIZES, {"from_logits": True, "reduction": "sum"}, LABELLED, term_size=1.0),
            Variant(
                "logits none", TEST_SIZES, {"from_logits": True, "temperature": 0.7, "reduction": "none"}, LABELLED,
                term_size=1.0,
            ),
            Variant("reverse", TEST_SIZES, {"beta": 1.0, "reduction": "mean"}, LABELLED),
        ),
        compile_variants=(
            Variant("128256", (2, 128256), {"beta": 0.1}),
            Variant("32000 with labels", (2, 32000), form={"labels": True}),
            Variant("128256 from logits", (2, 128256), {"from_logits": True, "temperature": 2.0}),
            Variant("128256, the reverse KL", (2, 128256), {"beta": 1.0}),
        ),
        bench_shapes=(
            Case("llama-3-8b", LLAMA_3, ROOFLINE), Case("llama-3-8b", LLAMA_3, MORE, FROM_LOGITS), *_COMPARED,
        ),
        **_PROPERTIES,
    ),
    Workload(
        name="tvd",
        reference=tvd_reference,
        inputs=_distributions("probs", "probs"),
        test_variants=(Variant("", TEST_SIZES, form=LABELLED), Variant("logits", TEST_SIZES, FROM_LOGITS, LABELLED)),
        compile_variants=(Variant("128256", (2, 128256)), Variant("32000 from logits", (2, 32000), FROM_LOGITS)),
        bench_shapes=(Case("llama-3-8b", LLAMA_3, MORE), *_COMPARED),
        **_PROPERTIES,
    ),
)  # fmt: skip
