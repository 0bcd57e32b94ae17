"""The floor of losses and log-probabilities of a head: their products alone, without what is between them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import OPS
from benchmarks.ops.eager import softcapped
from benchmarks.ops.peers import Run, refuse_other_options
from benchmarks.workloads import Case, Inputs
from tigon.ops.logits.divergence_reference import divergence_of_logits

# This many logits are converted into their gradient at once. Each of a few fp32 temporaries is then half a GiB.
PREPARED_ELEMENTS = 2**27


def with_dlogits(case: Case, inputs: Inputs) -> Inputs:
    """Return the operands of `products`: hidden states of the valid tokens, the weight, and d(logits) for gradients.

    d(logits) [valid, V] is the gradient of the mean loss. It is computed from logits as the head rounds them, and
    rounded to their dtype. Sequences [N, L] become tokens [N L]. A teacher's hidden states and weight follow.
    """
    hidden, weight, targets, *others = inputs.tensors.values()
    targets = targets.flatten()
    valid = (targets != -100).nonzero()[:, 0]
    x, targets = hidden.detach().flatten(0, -2)[valid], targets[valid]
    tensors = {"input": x.requires_grad_(hidden.requires_grad), "linear_weight": weight}
    if case.op == "linear_distillation":
        tensors |= {"teacher_hidden": others[0][valid], "teacher_weight": others[1]}
    if not inputs.grad_names:
        return Inputs(tensors)
    dlogits = x.new_empty(len(x), len(weight))
    step = max(1, PREPARED_ELEMENTS // len(weight))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        logits = F.linear(x[rows].detach(), weight.detach()).requires_grad_()
        wide = logits.to(torch.promote_types(x.dtype, torch.float32))
        if case.op == "linear_distillation":
            loss = _divergence(case, wide, F.linear(tensors["teacher_hidden"][rows], tensors["teacher_weight"]))
        else:
            wide = softcapped(wide, case.options.get("softcap"))
            loss = F.cross_entropy(wide, targets[rows], reduction="sum")
        dlogits[rows] = torch.autograd.grad(loss / len(x), logits)[0]
        del logits, wide, loss
    return Inputs(tensors | {"dlogits": dlogits})


def _divergence(case: Case, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    beta, temperature = case.options.get("beta", 0.5), case.options.get("temperature", 1.0)
    kind = {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    teacher_logits = teacher_logits.to(logits.dtype)
    return divergence_of_logits(logits / temperature, teacher_logits / temperature, kind, beta).sum()


def loss_products(case: Case) -> Run:
    """Load the products of a loss of alignment: those of `products`, and the logits of a reference model, if any."""
    refuse_other_options(case)
    n, length, h, v = case.shape
    own_flops = 3 * 2 * round(n * length * (1 - case.ignored)) * h * v
    return _products(recomputes_logits=(OPS[case.op].flops_of(case) or 0) > own_flops)


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
