"""Is a provider right? Its outputs and gradients against an exact result, judged by what eager code gets wrong.

|actual - exact| <= 2 |eager - exact| + 2 units in the last place          (`tigon.testing.assert_accurate`)

The units are those of eager code's dtype: a loss in half precision is not excused by its own coarseness.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench.cases import Case
from tigon.bench.eager import EAGER, SUMMED, head_logits
from tigon.bench.inputs import Inputs
from tigon.bench.providers import Provider
from tigon.testing import assert_accurate

__all__ = ["Bound", "Results", "Verdict", "eager_results", "exact_results", "judge"]

Results = dict[str, Tensor]  # by name: "output 0", "gradient of x"

# How many logits the exact reference holds at once: each of its half a dozen fp64 temporaries is 1 GiB.
REFERENCE_ELEMENTS = 2**27
# How many elements are judged at once: the oracle holds about ten fp64 copies of them.
JUDGED_ELEMENTS = 2**26


class Bound:
    """A provider bound to inputs; a call is forward + backward. What it destroys is a copy that `restore` renews."""

    def __init__(self, provider: Provider, run: Callable[..., tuple[Tensor, ...]], inputs: Inputs) -> None:
        self._provider, self._run, self._pristine = provider, run, inputs
        self._inputs = inputs.map(lambda name, x: x.clone() if name in provider.destroys else x)

    def restore(self) -> None:
        """Give back what a call has overwritten."""
        with torch.no_grad():
            for name in self._provider.destroys:
                if name == "upstream":
                    for copy, source in zip(self._inputs.upstream, self._pristine.upstream, strict=True):
                        copy.copy_(source)
                else:
                    self._inputs.tensors[name].copy_(self._pristine.tensors[name])

    def __call__(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """-> outputs, gradients of the inputs that want one."""
        inputs = self._inputs
        outputs = self._run(*inputs.tensors.values())
        if not self._provider.autograd:
            return (), outputs
        wanted = [inputs.tensors[name] for name in inputs.wanted]
        # Not .backward(): filling .grad may copy a gradient, which in a model no one does to an activation's.
        return outputs, torch.autograd.grad(outputs, wanted, inputs.upstream or None)

    def results(self) -> Results:
        """One call, by name."""
        outputs, gradients = self()
        named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        return named | {f"gradient of {n}": g for n, g in zip(self._inputs.wanted, gradients, strict=True)}


# --- references ----------------------------------------------------------------------------------


def eager_results(case: Case, inputs: Inputs, exact: Results) -> Results:
    """What eager code gives in the case's dtype: the measure of the error that is allowed."""
    eager = _eager(case)
    results = Bound(eager, eager.load(case), inputs).results()
    if case.op == "linear_cross_entropy":
        # One number can be right by luck, and then twice its error is no measure: take its typical error if larger.
        loss, exact = results["output 0"], exact["output 0"]
        error = max(abs(loss.item() - exact.item()), 2 * _typical_loss_error(case, inputs))
        results["output 0"] = (exact + error).to(loss.dtype)
    return results


def exact_results(case: Case, inputs: Inputs) -> Results:
    """The case computed with more digits: in fp32 (fp64 for a case in fp32), and fp64 for the softmax of the losses."""
    if case.op == "linear_cross_entropy":
        return _exact_linear_cross_entropy(case, inputs)
    if case.op in SUMMED:
        return _exact_loss(case, inputs)
    eager = _eager(case)
    wide = inputs.map(lambda _, x: x.to(_wide(case)) if x.is_floating_point() else x)
    return Bound(eager, eager.load(case), wide).results()


def _wide(case: Case) -> torch.dtype:
    return torch.float64 if case.dtype == torch.float32 else torch.float32


def _eager(case: Case) -> Provider:
    return Provider("eager", EAGER[case.op])


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, REFERENCE_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _exact_loss(case: Case, inputs: Inputs) -> Results:
    input, target = inputs.tensors["input"].detach(), inputs.tensors["target"]
    distributions = target.is_floating_point()
    gradient = torch.empty_like(input, dtype=_wide(case))
    loss, count = 0.0, len(target) if distributions else (target >= 0).sum()
    for rows in _chunks(*input.shape):
        chunk = input[rows].double().requires_grad_()
        part = SUMMED[case.op](case, chunk, target[rows].double() if distributions else target[rows]) / count
        gradient[rows] = torch.autograd.grad(part, chunk)[0]
        loss = loss + part.detach()
    return {"output 0": loss, "gradient of input": gradient}


def _exact_linear_cross_entropy(case: Case, inputs: Inputs) -> Results:
    x, weight, target = inputs.tensors["input"], inputs.tensors["linear_weight"], inputs.tensors["target"]
    wide_weight = weight.detach().to(_wide(case)).requires_grad_(weight.requires_grad)
    gradients = {
        name: torch.zeros_like(inputs.tensors[name], dtype=_wide(case), requires_grad=False) for name in inputs.wanted
    }
    loss, count = 0.0, (target >= 0).sum()
    for rows in _chunks(x.shape[0], weight.shape[0]):
        chunk = x[rows].detach().to(_wide(case)).requires_grad_(x.requires_grad)
        logits = head_logits(chunk, wide_weight, case.options.get("softcap"))
        part = F.cross_entropy(logits.double(), target[rows], reduction="sum") / count
        del logits
        leaves = {"input": chunk, "linear_weight": wide_weight}
        parts = torch.autograd.grad(part, [leaves[name] for name in inputs.wanted])
        for name, gradient in zip(inputs.wanted, parts, strict=True):
            if name == "input":
                gradients[name][rows] = gradient
            else:
                gradients[name] += gradient
        loss = loss + part.detach()
    return {"output 0": loss} | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def _typical_loss_error(case: Case, inputs: Inputs) -> float:
    """Standard error of a mean loss whose logits were rounded: of the tokens' errors, added up as independent ones."""
    x, weight, target = (inputs.tensors[name].detach() for name in ("input", "linear_weight", "target"))
    wide_weight, softcap, total = weight.to(_wide(case)), case.options.get("softcap"), 0.0
    for rows in _chunks(x.shape[0], weight.shape[0]):
        rounded = head_logits(x[rows], weight, softcap)
        exact = head_logits(x[rows].to(_wide(case)), wide_weight, softcap)
        errors = [F.cross_entropy(z.to(_wide(case)), target[rows], reduction="none") for z in (rounded, exact)]
        total = total + (errors[0] - errors[1]).square().sum()
    return ((total**0.5) / (target >= 0).sum()).item()


# --- verdict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """`wrong` is "" or what is wrong; the errors are relative, |actual - exact| / |exact|, of the worst tensor."""

    wrong: str
    error: float
    eager_error: float


def judge(actual: Results, eager: Results, exact: Results) -> Verdict:
    """Compare every output and gradient; the first that breaks the rule is named."""
    wrong, errors = "", []
    for name, right in exact.items():
        found, plain = actual[name], eager[name]
        if found.shape != right.shape:
            return Verdict(f"{name}: shape {tuple(found.shape)} for {tuple(right.shape)}", float("nan"), float("nan"))
        errors.append((_relative(found, right), _relative(plain, right)))
        common = torch.promote_types(found.dtype, plain.dtype)
        wrong = wrong or _first_error(name, found.to(common), plain.to(common), right)
    # A NaN compares as neither larger nor smaller: put it first.
    worst = max(errors, key=lambda pair: (pair[0] != pair[0], pair[0]))
    return Verdict(wrong, *worst)


def _first_error(name: str, found: Tensor, plain: Tensor, right: Tensor) -> str:
    try:
        if right.dim() == 0:
            assert_accurate(found, plain, right, smallest=1.0, msg=name)
        elif right.numel() <= JUDGED_ELEMENTS:
            assert_accurate(found, plain, right, msg=name)
        else:
            parts = [x.reshape(-1).split(JUDGED_ELEMENTS) for x in (found, plain, right)]
            for i, (a, b, c) in enumerate(zip(*parts, strict=True)):
                assert_accurate(a, b, c, msg=f"{name}, elements from {i * JUDGED_ELEMENTS}")
    except AssertionError as problem:
        return " ".join(str(problem).split())
    return ""


def _relative(actual: Tensor, exact: Tensor) -> float:
    distance = torch.linalg.vector_norm(actual.to(exact.dtype) - exact)
    return (distance / torch.linalg.vector_norm(exact)).item()
