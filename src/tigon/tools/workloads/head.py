"""Workload of the loss inside the head. Sizes: T tokens, H hidden, V vocabulary."""

import math

import torch

from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.tools.workloads.inputs import SPREAD, InputMaker, Inputs
from tigon.tools.workloads.logits import IGNORED, TOKEN_OUTPUTS
from tigon.tools.workloads.workload import MORE, BenchShape, Problem, Variant, Workload, small, sweep

__all__ = ["WORKLOADS"]

LINEAR, FIRST_LINEAR, MORE_LINEAR = ("linear",), ("first-light", "linear"), ("more", "linear")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
FP32_SUM = {"acc_dtype": torch.float32}


def _linear_cross_entropy(make: InputMaker) -> Inputs:
    """Make hidden states, the weight of the head and targets; form: with `bias` also the bias of the head."""
    t, h, v = make.sizes
    weight = make.normal(v, h).mul_(SPREAD / math.sqrt(h))
    targets = make.targets(t, v)
    # Adding a * W[target] to a hidden state raises the target's logit by a * |W[target]|^2 = a * SPREAD^2.
    lift = make.target_logits(t, v) / SPREAD**2
    hidden = make.normal(t, h)
    hidden.add_(weight[targets.clamp(min=0)] * lift.to(hidden.dtype)[:, None])
    tensors = {"input": hidden.requires_grad_(), "linear_weight": weight.requires_grad_(), "target": targets}
    if make.form.get("bias"):
        tensors["linear_bias"] = make.normal(v).requires_grad_()
    return Inputs(tensors)


def _flops(case: Problem) -> int:
    t, h, v = case.shape
    gradients = set() if case.no_grad else {"input", "linear_weight"} - set(case.frozen)
    # Ignored rows need no product.
    return 2 * (1 + len(gradients)) * round(t * (1 - case.ignored)) * h * v


WORKLOADS = (
    Workload(
        name="linear_cross_entropy",
        reference=linear_cross_entropy_reference,
        inputs=_linear_cross_entropy,
        legend="T x H x V",
        is_loss=True,
        has_cpu_code=True,
        test_variants=(
            Variant("", (7, 24, 100), form=IGNORED | {"bias": True}),
            Variant("none", (7, 24, 100), {"reduction": "none"}, IGNORED),
        ),
        flops=_flops,
        bench_shapes=(
            BenchShape("llama-3-8b", (8192, 4096, 128256), FIRST_LINEAR),
            BenchShape("llama-3-8b", (32768, 4096, 128256), FIRST_LINEAR),
            BenchShape("gemma-2-2b", (8192, 2304, 256000), FIRST_LINEAR),
            BenchShape("gemma-2-2b", (8192, 2304, 256000), MORE, {"softcap": 30.0}),
            BenchShape("qwen3-1.7b", (16384, 2048, 151936), FIRST_LINEAR),
            BenchShape("llama-3-8b", (1024, 4096, 128256), LINEAR),
            BenchShape("llama-3-8b", (2048, 4096, 128256), LINEAR),
            # These three are as in instruction tuning, with a frozen head as in LoRA, and as in evaluation.
            BenchShape("llama-3-8b", (16384, 4096, 128256), MORE_LINEAR, ignored=0.75),
            BenchShape("llama-3-8b", (8192, 4096, 128256), MORE_LINEAR, frozen=("linear_weight",)),
            BenchShape("llama-3-8b", (8192, 4096, 128256), LINEAR, no_grad=True),
            BenchShape("llama-3-8b", (8192, 4096, 128256), LINEAR, FP32_SUM),
            BenchShape("qwen3-1.7b", (16384, 2048, 151936), LINEAR, FP32_SUM),
            BenchShape("llama-3-8b", (8192, 4096, 128256), LINEAR, TOKEN_OUTPUTS),
            small(1024, 128, 16384),
            small(1024, 128, 16384, ignored=0.75),
            small(1024, 128, 16384, frozen=("linear_weight",)),
            small(1024, 128, 16384, no_grad=True),
            small(1024, 128, 16384, options=FP32_SUM),
            small(1024, 128, 16384, options=TOKEN_OUTPUTS),
            *sweep((t, 4096, 128256) for t in LENGTHS),
        ),
    ),
)
