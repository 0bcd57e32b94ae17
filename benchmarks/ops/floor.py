"""The floor of losses and log-probabilities of a head: their products alone, without what is between them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import Case
from benchmarks.ops.eager import softcapped
from benchmarks.ops.peers import Run, refuse_other_options
from benchmarks.workloads import Inputs
from tigon.ops.logits.divergence_reference import divergence_of_logits

# This many logits are converted into their gradient at once. Each of a few fp32 temporaries is then half a GiB.
PREPARED_ELEMENTS = 2**27


def with_dlogits(case: Case, inputs: Inputs) -> Inputs:
    """Return the operands of `products`: hidden states of the valid tokens, the weight, and d(logits) for gradients.

    d(logits) [valid, V] is the gradient of the mean loss. It is computed from logits as the head rounds them, and
    rounded to their dtype.
    """
    softcap = case.options.get("softcap")
    input, linear_weight, target = inputs.tensors.values()
    valid = (target != -100).nonzero()[:, 0]
    x, target = input.detach()[valid], target[valid]
    tensors = {"input": x.requires_grad_(input.requires_grad), "linear_weight": linear_weight}
    if not inputs.grad_names:
        return Inputs(tensors)
    dlogits = x.new_empty(len(x), len(linear_weight))
    wide, step = torch.promote_types(x.dtype, torch.float32), max(1, PREPARED_ELEMENTS // len(linear_weight))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        logits = F.linear(x[rows].detach(), linear_weight.detach()).requires_grad_()
        wide_logits = softcapped(logits.to(wide), softcap)
        loss = F.cross_entropy(wide_logits, target[rows], reduction="sum") / len(x)
        dlogits[rows] = torch.autograd.grad(loss, logits)[0]
        del logits, wide_logits, loss
    return Inputs(tensors | {"dlogits": dlogits})


def with_flat_dlogits(case: Case, inputs: Inputs) -> Inputs:
    """Return the operands of `loss_products`, in which sequences [N, L] are tokens [N L]."""
    hidden, weight, targets = list(inputs.tensors.values())[:3]
    x = hidden.detach().flatten(0, 1).requires_grad_(hidden.requires_grad)
    return with_dlogits(case, Inputs({"input": x, "linear_weight": weight, "target": targets.flatten()}))


def loss_products(case: Case) -> Run:
    """Load the products of a loss of alignment: those of `products`, and the logits of a reference model, if any."""
    refuse_other_options(case)
    return _products(recomputes_logits=bool(case.flops and case.flops > 3 * _product_flops(case)))


def with_distillation_dlogits(case: Case, inputs: Inputs) -> Inputs:
    """Return the operands of `distillation_products`: hidden states of the valid tokens, both heads, and d(logits)."""
    hidden, weight, targets, teacher_hidden, teacher_weight = inputs.tensors.values()
    valid = (targets != -100).nonzero()[:, 0]
    x, y = hidden.detach()[valid], teacher_hidden[valid]
    tensors = {
        "input": x.requires_grad_(hidden.requires_grad), "linear_weight": weight,
        "teacher_hidden": y, "teacher_weight": teacher_weight,
    }  # fmt: skip
    if not inputs.grad_names:
        return Inputs(tensors)
    beta, temperature = case.options.get("beta", 0.5), case.options.get("temperature", 1.0)
    kind = {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    dlogits = x.new_empty(len(x), len(weight))
    wide, step = torch.promote_types(x.dtype, torch.float32), max(1, PREPARED_ELEMENTS // len(weight))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        logits = F.linear(x[rows].detach(), weight.detach()).requires_grad_()
        teacher_logits = F.linear(y[rows], teacher_weight).to(wide)
        divergence = divergence_of_logits(logits.to(wide) / temperature, teacher_logits / temperature, kind, beta)
        dlogits[rows] = torch.autograd.grad(divergence.sum() / len(x), logits)[0]
        del logits, teacher_logits, divergence
    return Inputs(tensors | {"dlogits": dlogits})


def distillation_products(case: Case) -> Run:
    """Load the products of `linear_distillation`: those of `products`, and the logits of the teacher."""
    refuse_other_options(case, "beta", "temperature", "fp32_logits")
    run_student = _products(recomputes_logits=False)

    @torch.no_grad()
    def run(
        input: Tensor, linear_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
        dlogits: Tensor | None = None, chunk: int = 8192,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        teacher_logits = input.new_empty(min(chunk, len(input)), len(teacher_weight))
        for start in range(0, len(input), chunk):
            rows = teacher_hidden[start : start + chunk]
            torch.mm(rows, teacher_weight.t(), out=teacher_logits[: len(rows)])
        return run_student(input, linear_weight, dlogits, chunk)

    return run


def _product_flops(case: Case) -> int:
    n, length, h, v = case.shape
    return 2 * round(n * length * (1 - case.ignored)) * h * v


def log_prob_products(case: Case) -> Run:
    """Load the products of `linear_log_probs`: those of `products`, and the logits again for the gradients."""
    refuse_other_options(case, "softcap", "return_entropy", "temperature")
    return _products(recomputes_logits=True)


def products(case: Case) -> Run:
    """Load the matrix products of the valid tokens alone, with no softmax: they are the floor.

        a = x W^T,    dx = da W,    dW += da^T x        (only for the gradients that are needed)

    The operands are those of the loss: x and W of the case, and da = d(logits). At its power limit, a GPU multiplies
    faster if fewer bits of the operands differ. So other operands, such as the logits in place of da, would give
    another floor. `with_dlogits` computes da before a round, outside the measured part, and da lives as long as the
    round.

    The products take 8192 tokens at a time, which is large enough for cuBLAS. The first chunk writes dW, and the others
    add to it.
    """
    # None of these options changes the products.
    refuse_other_options(case, "softcap", "acc_dtype", "return_log_probs", "return_entropy")
    return _products(recomputes_logits=False)


def _products(recomputes_logits: bool) -> Run:
    @torch.no_grad()
    def run(
        input: Tensor, linear_weight: Tensor, dlogits: Tensor | None = None, chunk: int = 8192
    ) -> tuple[Tensor, ...]:
        logits = input.new_empty(min(chunk, len(input)), len(linear_weight))
        dinput = torch.empty_like(input) if input.requires_grad else None
        dweight = torch.empty_like(linear_weight) if linear_weight.requires_grad else None
        for start in range(0, len(input), chunk):
            rows = slice(start, start + chunk)
            x = input[rows]
            torch.mm(x, linear_weight.t(), out=logits[: len(x)])
            if dlogits is None:
                continue
            if recomputes_logits:
                torch.mm(x, linear_weight.t(), out=logits[: len(x)])
            if dinput is not None:
                torch.mm(dlogits[rows], linear_weight, out=dinput[rows])
            if dweight is not None and start == 0:
                torch.mm(dlogits[rows].t(), x, out=dweight)
            elif dweight is not None:
                dweight.addmm_(dlogits[rows].t(), x)
        return tuple(gradient for gradient in (dinput, dweight) if gradient is not None)

    return run
