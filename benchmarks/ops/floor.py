"""The floor of losses and log-probabilities of a head: their products alone, without what is between them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import OPS
from benchmarks.ops.eager import softcapped
from benchmarks.ops.peers import Run, refuse_other_options
from benchmarks.workloads import Case, Inputs

# This many logits are converted into their gradient at once. Each of a few fp32 temporaries is then half a GiB.
PREPARED_ELEMENTS = 2**27


def with_dlogits(case: Case, inputs: Inputs) -> Inputs:
    """Return the operands of `products`: hidden states of the valid tokens, the weight, and d(logits) for gradients.
    d(logits) [valid, V] is the gradient of the mean cross entropy. It is computed from logits as the head rounds them,
    and rounded to their dtype. Sequences [N, L] become tokens [N L]. A teacher's hidden states and weight follow."""
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
        wide = softcapped(wide, case.options.get("softcap"))
        loss = F.cross_entropy(wide, targets[rows], reduction="sum")
        dlogits[rows] = torch.autograd.grad(loss / len(x), logits)[0]
        del logits, wide, loss
    return Inputs(tensors | {"dlogits": dlogits})


# The options of each op that do not change its products.
_OTHER_OPTIONS = {
    "linear_cross_entropy": ("softcap", "acc_dtype", "return_log_probs", "return_entropy"),
    "linear_log_probs": ("softcap", "return_entropy", "temperature"),
    "linear_distillation": ("beta", "temperature", "fp32_logits"),
}


def _recomputes_logits(case: Case) -> bool:
    """Return whether there are logits twice: again for the gradients, or those of a reference model."""
    if case.op not in _OTHER_OPTIONS:
        n, length, h, v = case.shape
        return (OPS[case.op].flops_of(case) or 0) > 3 * 2 * round(n * length * (1 - case.ignored)) * h * v
    return case.op == "linear_log_probs"


def products(case: Case) -> Run:
    """Load the matrix products of the valid tokens alone, with no softmax: they are the floor.

        a = x W^T,    dx = da W,    dW += da^T x        (only for the gradients that are needed)

    The operands are those of the loss: x and W of the case, and da = d(logits). At its power limit, a GPU multiplies
    faster if fewer bits of the operands differ. So other operands, such as the logits in place of da, would give
    another floor. `with_dlogits` computes da before a round, outside the measured part, and da lives as long as the
    round. The logits are computed a second time if the op must do so, and those of a teacher too.

    The products take 8192 tokens at a time, which is large enough for cuBLAS. The first chunk writes dW, and the others
    add to it.
    """
    refuse_other_options(case, *_OTHER_OPTIONS.get(case.op, ()))
    recomputes_logits = _recomputes_logits(case)

    @torch.no_grad()
    def run(input: Tensor, linear_weight: Tensor, *others: Tensor, chunk: int = 8192) -> tuple[Tensor, ...]:
        teacher, dlogits = (others[:2], others[2:]) if case.op == "linear_distillation" else ((), others)
        logits = input.new_empty(min(chunk, len(input)), len(linear_weight))
        dinput = torch.empty_like(input) if input.requires_grad else None
        dweight = torch.empty_like(linear_weight) if linear_weight.requires_grad else None
        for start in range(0, len(input), chunk):
            rows = slice(start, start + chunk)
            x = input[rows]
            if teacher:
                torch.mm(teacher[0][rows], teacher[1].t(), out=logits[: len(x)])
            for _ in range(1 + (recomputes_logits and bool(dlogits))):
                torch.mm(x, linear_weight.t(), out=logits[: len(x)])
            if not dlogits:
                continue
            if dinput is not None:
                torch.mm(dlogits[0][rows], linear_weight, out=dinput[rows])
            if dweight is not None and start == 0:
                torch.mm(dlogits[0][rows].t(), x, out=dweight)
            elif dweight is not None:
                dweight.addmm_(dlogits[0][rows].t(), x)
        return tuple(gradient for gradient in (dinput, dweight) if gradient is not None)

    return run
