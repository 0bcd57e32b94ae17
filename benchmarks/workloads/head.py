"""Workloads of the loss and the log-probabilities inside the head. Sizes: T tokens, H hidden, V vocabulary."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads.inputs import SPREAD, InputMaker, Inputs
from benchmarks.workloads.logits import IGNORED, TOKEN_OUTPUTS, loss_reference
from benchmarks.workloads.workload import MORE, Case, Variant, Workload, small, sweep
from tigon.ops.head.linear_distillation import linear_distillation_reference
from tigon.ops.head.linear_log_probs import linear_log_probs_reference

LINEAR, FIRST_LINEAR, MORE_LINEAR = ("linear",), ("first-light", "linear"), ("more", "linear")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
FP32_SUM = {"acc_dtype": torch.float32}
# The distance of a student's logits from its teacher's; their divergence is then a fraction of a nat.
DISTANCE = 0.7
# Scale, soft cap and temperature apply in this order, and their order matters.
TRANSFORMED = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.5}
TEACHER_TRANSFORMED = {"teacher_softcap": 7.0, "teacher_logit_scale": 0.8}
EVERY_LOG_PROB_OUTPUT = {
    "return_entropy": True, "return_top1": True, "return_mean_logits": True, "return_sum_sq_probs": True,
}  # fmt: skip


def _linear_cross_entropy(make: InputMaker) -> Inputs:
    """Make hidden states, the weight of the head and targets; form: with `bias` also the bias of the head."""
    return Inputs(head_inputs(make, *make.sizes))


def head_inputs(make: InputMaker, t: int, h: int, v: int) -> dict[str, Tensor]:
    """Return the tensors of `_linear_cross_entropy` by name."""
    weight = make.normal(v, h).mul_(SPREAD / math.sqrt(h))
    targets = make.targets(t, v)
    # Adding a * W[target] to a hidden state raises the target's logit by a * |W[target]|^2 = a * SPREAD^2.
    lift = make.target_logits(t, v) / SPREAD**2
    hidden = make.normal(t, h)
    hidden.add_(weight[targets.clamp(min=0)] * lift.to(hidden.dtype)[:, None])
    tensors = {"input": hidden.requires_grad_(), "linear_weight": weight.requires_grad_(), "target": targets}
    if make.form.get("bias"):
        tensors["linear_bias"] = make.normal(v).requires_grad_()
    return tensors


def _linear_loss_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, *,
    acc_dtype: torch.dtype | None = None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the loss and the results for each token that are requested from all logits. One product sums in fp32."""
    return loss_reference(F.linear(input, linear_weight, linear_bias), target, **options)


def _linear_log_probs(make: InputMaker) -> Inputs:
    """Make hidden states, the weight of the head, targets and upstream gradients. form: with `bias` also the bias of
    the head, with `extra_targets` this number of further targets of each token."""
    t, _, v = make.sizes
    names = {"input": "hidden", "linear_weight": "weight", "target": "targets", "linear_bias": "bias"}
    tensors = {names[name]: x for name, x in head_inputs(make, *make.sizes).items()}
    upstream = [make.normal(t, dtype=torch.float32) for _ in range(1 + bool(make.options.get("return_entropy")))]
    k = make.form.get("extra_targets")
    if k:
        tensors["extra_targets"] = make.targets(t * k, v).view(t, k)
        upstream.append(make.normal(t, k, dtype=torch.float32))
    return Inputs(tensors, tuple(upstream))


def _linear_distillation(make: InputMaker) -> Inputs:
    """Make the hidden states and heads of a student and of its teacher, which are as wide, and targets. form: with
    `bias` also the biases. With `top_k` the teacher is this number of log-probabilities of each token."""
    t, h, v = make.sizes
    names = {"input": "hidden", "linear_weight": "weight", "target": "targets", "linear_bias": "bias"}
    tensors = {names[name]: x for name, x in head_inputs(make, t, h, v).items()}
    k = make.form.get("top_k")
    if k:
        log_probs = torch.log_softmax(make.normal(t, v, dtype=torch.float32).mul_(SPREAD), -1)
        best = log_probs.topk(k, -1)
        return Inputs(tensors | {"teacher_log_probs": best.values, "teacher_indices": best.indices})
    near = lambda x, distance: make.normal(*x.shape).mul_(distance).add_(x.detach())
    # The logits of the two models differ by about `DISTANCE`.
    teacher = {
        "teacher_hidden": near(tensors["hidden"], DISTANCE / SPREAD),
        "teacher_weight": near(tensors["weight"], DISTANCE / math.sqrt(h)),
    }
    if make.form.get("bias"):
        teacher["teacher_bias"] = make.normal(v)
    return Inputs(tensors | teacher)


def _call_distillation(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Call the op or its reference with the tensors of `_linear_distillation`, in their order or by name."""
    if not tensors:
        return function(**options)
    hidden, weight, targets, *others = tensors
    has_bias = others[0].dim() == 1
    bias, teacher = (others[0], others[1:]) if has_bias else (None, others)
    is_top_k = not teacher[-1].is_floating_point()
    names = ("log_probs", "indices") if is_top_k else ("hidden", "weight", "bias")
    named = {f"teacher_{name}": tensor for name, tensor in zip(names, teacher, strict=False)}
    return function(hidden, weight, targets, bias=bias, **named, **options)


def head_flops(case: Case, names: tuple[str, str], more_products: int = 0, recomputes: bool = False) -> int:
    """Count the operations of the products of the valid tokens, with the shape (.., H, V). There is one product for the
    logits, one for the gradient of each of `names`, `more_products` for the logits of other models, and one more if
    backward recomputes the logits."""
    *tokens, h, v = case.shape
    gradients = 0 if case.no_grad else len(set(names) - set(case.frozen))
    products = 1 + more_products + gradients + (recomputes and bool(gradients))
    # Ignored rows need no product.
    return 2 * products * round(math.prod(tokens) * (1 - case.ignored)) * h * v


WORKLOADS = (
    Workload(
        name="linear_cross_entropy",
        reference=_linear_loss_reference,
        inputs=_linear_cross_entropy,
        legend="T x H x V",
        is_loss=True,
        has_cpu_code=True,
        test_variants=(
            Variant("", (7, 24, 100), form=IGNORED | {"bias": True}),
            Variant("none", (7, 24, 100), {"reduction": "none"}, IGNORED),
        ),
        flops=lambda case: head_flops(case, ("input", "linear_weight")),
        bench_shapes=(
            Case("llama-3-8b", (8192, 4096, 128256), FIRST_LINEAR),
            Case("llama-3-8b", (32768, 4096, 128256), FIRST_LINEAR),
            Case("gemma-2-2b", (8192, 2304, 256000), FIRST_LINEAR),
            Case("qwen3-1.7b", (16384, 2048, 151936), FIRST_LINEAR),
            Case("llama-3-8b", (1024, 4096, 128256), LINEAR),
            Case("llama-3-8b", (2048, 4096, 128256), LINEAR),
            # These three are as in instruction tuning, with a frozen head as in LoRA, and as in evaluation.
            Case("llama-3-8b", (16384, 4096, 128256), MORE_LINEAR, ignored=0.75),
            Case("llama-3-8b", (8192, 4096, 128256), MORE_LINEAR, frozen=("linear_weight",)),
            Case("llama-3-8b", (8192, 4096, 128256), LINEAR, no_grad=True),
            Case("llama-3-8b", (8192, 4096, 128256), LINEAR, FP32_SUM),
            Case("qwen3-1.7b", (16384, 2048, 151936), LINEAR, FP32_SUM),
            Case("llama-3-8b", (8192, 4096, 128256), LINEAR, TOKEN_OUTPUTS),
            small(1024, 128, 16384),
            small(1024, 128, 16384, ignored=0.75),
            small(1024, 128, 16384, frozen=("linear_weight",)),
            small(1024, 128, 16384, no_grad=True),
            small(1024, 128, 16384, options=FP32_SUM),
            small(1024, 128, 16384, options=TOKEN_OUTPUTS),
            *sweep((t, 4096, 128256) for t in LENGTHS),
        ),
    ),
    Workload(
        name="linear_log_probs",
        reference=linear_log_probs_reference,
        inputs=_linear_log_probs,
        legend="T x H x V",
        is_loss=True,
        has_cpu_code=True,
        test_variants=(
            Variant("", (7, 24, 100), form=IGNORED | {"bias": True}),
            Variant(
                "with entropy and extra targets",
                (7, 24, 100),
                {"return_entropy": True, **TRANSFORMED},
                IGNORED | {"extra_targets": 3},
            ),
            Variant("in fp32", (7, 24, 100), {"fp32_products": True}, IGNORED),
        ),
        compile_variants=(
            # The head is narrow, because only V matters to the kernels.
            Variant("128256", (2, 16, 128256)),
            Variant("128256, entropy and temperature", (2, 16, 128256), {"return_entropy": True, "temperature": 0.7}),
            Variant(
                "256000, every output", (2, 16, 256000), {**EVERY_LOG_PROB_OUTPUT, **TRANSFORMED}, {"extra_targets": 20}
            ),
            Variant("128256, every output in fp32", (2, 16, 128256), {**EVERY_LOG_PROB_OUTPUT, "fp32_products": True}),
        ),
        flops=lambda case: head_flops(case, ("hidden", "weight"), recomputes=True),
        bench_shapes=(
            Case("llama-3-8b", (8192, 4096, 128256), MORE),
            Case("llama-3-8b", (8192, 4096, 128256), MORE, {"return_entropy": True, "temperature": 0.7}),
            Case("llama-3-8b", (8192, 4096, 128256), MORE, no_grad=True),
            Case("llama-3-8b", (32768, 4096, 128256), MORE),
            Case("llama-3-8b", (65536, 4096, 128256), MORE),
            Case("llama-3-8b", (16384, 4096, 128256), MORE, ignored=0.75),
            Case("llama-3-8b", (8192, 4096, 128256), MORE, frozen=("weight",)),
            small(1024, 128, 16384),
            small(1024, 128, 16384, options={"return_entropy": True, "temperature": 0.7, "softcap": 5.0}),
            small(1024, 128, 16384, no_grad=True),
            *sweep((t, 4096, 128256) for t in LENGTHS),
        ),
    ),
    Workload(
        name="linear_distillation",
        call=_call_distillation,
        reference=functools.partial(_call_distillation, linear_distillation_reference),
        inputs=_linear_distillation,
        legend="T x H x V",
        is_loss=True,
        has_cpu_code=True,
        # The gradients are differences of probabilities.
        test_variants=(
            Variant("", (7, 24, 100), {"beta": 0.3}, IGNORED | {"bias": True}, term_size=1.0),
            Variant(
                "with labels",
                (7, 24, 100),
                {"divergence": "kl", "hard_weight": 0.5, "soft_weight": 4.0, **TRANSFORMED, **TEACHER_TRANSFORMED},
                IGNORED,
                term_size=1.0,
            ),
            Variant("none", (7, 24, 100), {"divergence": "reverse_kl", "reduction": "none"}, IGNORED, term_size=1.0),
            Variant("of the top 5", (7, 24, 100), {"divergence": "tvd"}, IGNORED | {"top_k": 5}, term_size=1.0),
            Variant("of the cosine", (7, 24, 100), {"divergence": "cosine", "acc_dtype": torch.float32}, IGNORED),
        ),
        compile_variants=(
            Variant("128256", (2, 16, 128256)),
            Variant("256000, KL with labels", (2, 16, 256000), {"divergence": "kl", "hard_weight": 0.5, **TRANSFORMED}),
            Variant("128256, reverse KL", (2, 16, 128256), {"beta": 1.0, "temperature": 2.0, "reduction": "none"}),
            Variant("128256, TVD", (2, 16, 128256), {"divergence": "tvd", "return_entropy": True}),
            Variant("128256, fp32 logits", (2, 16, 128256), {"fp32_logits": True}),
            Variant("128256, cosine", (2, 16, 128256), {"divergence": "cosine"}),
            Variant(
                "256000, every option",
                (2, 16, 256000),
                {
                    "hard_weight": 0.5,
                    "return_parts": True,
                    "return_entropy": True,
                    **TRANSFORMED,
                    **TEACHER_TRANSFORMED,
                },
            ),
        ),
        flops=lambda case: head_flops(case, ("hidden", "weight"), more_products=1),
        bench_shapes=(
            Case("llama-3-8b", (8192, 4096, 128256), MORE),
            Case("llama-3-8b", (8192, 4096, 128256), MORE, {"beta": 0.0}),
            # The peers keep the logits in fp32.
            Case("llama-3-8b", (8192, 4096, 128256), MORE, {"fp32_logits": True}),
            Case("llama-3-8b", (65536, 4096, 128256), MORE),
            Case("llama-3-8b", (8192, 4096, 128256), MORE, no_grad=True),
            small(1024, 128, 16384),
            small(1024, 128, 16384, options={"beta": 0.0, "temperature": 2.0}),
            *sweep((t, 4096, 128256) for t in LENGTHS),
        ),
    ),
)
