"""Is a provider right? Its outputs and gradients against an exact result, judged by what eager code gets wrong.

|actual - exact| <= 2 |eager - exact| + 2 units in the last place          (`tigon.testing.assert_accurate`)

The units are those of eager code's dtype: a loss in half precision is not excused by its own coarseness.

Beside the verdict stand the relative errors of every output and gradient, |x - exact| / |exact| in the 2-norm, and
their ratio to eager code's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.testing import assert_accurate
from tigon.tools.bench.cases import Case
from tigon.tools.bench.eager import EAGER, SUMMED, head_logits, token_results
from tigon.tools.bench.inputs import Inputs
from tigon.tools.bench.providers import Provider

__all__ = [
    "Bound",
    "Errors",
    "Results",
    "Verdict",
    "eager_results",
    "exact_results",
    "judge",
    "typical_loss_error",
]

Results = dict[str, Tensor]  # by name: "output 0", "gradient of x"

# How many logits the exact reference holds at once: each of its half a dozen fp64 temporaries is 1 GiB.
REFERENCE_ELEMENTS = 2**27
# How many elements are judged at once: the oracle holds about ten fp64 copies of them.
JUDGED_ELEMENTS = 2**26


class Bound:
    """A provider bound to inputs; a call is forward + backward, or forward alone where no gradient is wanted.

    What it destroys is a copy that `restore` renews.
    """

    def __init__(self, provider: Provider, run: Callable[..., tuple[Tensor, ...]], inputs: Inputs) -> None:
        self._provider, self._run, self._pristine = provider, run, inputs
        self._inputs = inputs.map(lambda name, x: x.clone() if name in provider.destroys else x)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that a call returns."""
        return self._inputs.gradient_bytes

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
        wanted = [inputs.tensors[name] for name in inputs.wanted]
        with torch.set_grad_enabled(bool(wanted)):
            outputs = self._run(*inputs.tensors.values())
        if not self._provider.autograd:
            return (), outputs
        if not wanted:
            return outputs, ()
        # Not .backward(): filling .grad may copy a gradient, which in a model no one does to an activation's.
        differentiated = outputs[: len(inputs.upstream) or 1]
        return outputs, torch.autograd.grad(differentiated, wanted, inputs.upstream or None)

    def results(self) -> Results:
        """One call, by name."""
        outputs, gradients = self()
        named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        return named | {f"gradient of {n}": g for n, g in zip(self._inputs.wanted, gradients, strict=True)}


# --- references ----------------------------------------------------------------------------------


def eager_results(case: Case, inputs: Inputs) -> Results:
    """What eager code gives in the case's dtype: the measure of the error that is allowed."""
    eager = _eager(case)
    return Bound(eager, eager.load(case), inputs).results()


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
    loss, count, beside = 0.0, (target >= 0).sum(), []
    for rows in _chunks(x.shape[0], weight.shape[0]):
        chunk = x[rows].detach().to(_wide(case)).requires_grad_(x.requires_grad)
        logits = head_logits(chunk, wide_weight, case.options.get("softcap")).double()
        part = F.cross_entropy(logits, target[rows], reduction="sum") / count
        beside.append(token_results(case.options, logits, target[rows]))
        del logits
        leaves = {"input": chunk, "linear_weight": wide_weight}
        parts = torch.autograd.grad(part, [leaves[name] for name in inputs.wanted]) if inputs.wanted else ()
        for name, gradient in zip(inputs.wanted, parts, strict=True):
            if name == "input":
                gradients[name][rows] = gradient
            else:
                gradients[name] += gradient
        loss = loss + part.detach()
    outputs = {f"output {i}": torch.cat(parts) for i, parts in enumerate(zip(*beside, strict=True), 1)}
    return {"output 0": loss} | outputs | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


@torch.no_grad()
def typical_loss_error(case: Case, inputs: Inputs) -> float:
    """Standard error of a mean loss whose logits were rounded: of the tokens' errors, added up as independent ones.

    0 for ops that round no logits.
    """
    if case.op != "linear_cross_entropy":
        return 0.0
    x, weight, target = (inputs.tensors[name].detach() for name in ("input", "linear_weight", "target"))
    wide_weight, softcap, total = weight.to(_wide(case)), case.options.get("softcap"), 0.0
    for rows in _chunks(x.shape[0], weight.shape[0]):
        rounded = head_logits(x[rows], weight, softcap)
        exact = head_logits(x[rows].to(_wide(case)), wide_weight, softcap)
        errors = [F.cross_entropy(z.to(_wide(case)), target[rows], reduction="none") for z in (rounded, exact)]
        total = total + (errors[0] - errors[1]).square().sum()
    return ((total**0.5) / (target >= 0).sum()).item()


# --- verdict -------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Relative errors of one tensor, |x - exact| / |exact|: the provider's and eager code's."""

    error: float
    eager_error: float

    @property
    def ratio(self) -> float:
        """NaN where eager code is exact."""
        return self.error / self.eager_error if self.eager_error else float("nan")


@dataclass(frozen=True)
class Verdict:
    """`wrong` is "" or what is wrong; the errors are those of the worst tensor, and of each by its name."""

    wrong: str
    error: float = float("nan")
    eager_error: float = float("nan")
    errors: dict[str, Errors] = field(default_factory=dict)


def judge(actual: Results, eager: Results, exact: Results, typical: float = 0.0) -> Verdict:
    """Compare every output and gradient; the first that breaks the rule is named.

    One number can be right by luck, and then its error is no measure. So eager code's error in a loss counts as at
    least `typical`, its standard error, in the ratios, and as at least twice that in the rule.
    """
    wrong, errors, rule = "", {}, {}
    for name, right in exact.items():
        if name not in actual:
            return Verdict(f"{name}: missing")
        found, plain = actual[name], eager[name]
        if found.shape != right.shape:
            return Verdict(f"{name}: shape {tuple(found.shape)} for {tuple(right.shape)}")
        error, eager_error, least = _relative(found, right), _relative(plain, right), 0.0
        if typical and right.dim() == 0:
            least = typical / right.abs().item()
            plain = (right + max(abs(plain.item() - right.item()), 2 * typical)).to(plain.dtype)
        errors[name] = Errors(error, max(eager_error, least))
        rule[name] = Errors(error, max(eager_error, 2 * least))
        common = torch.promote_types(found.dtype, plain.dtype)
        wrong = wrong or _first_error(name, found.to(common), plain.to(common), right)
    # A NaN compares as neither larger nor smaller: put it first.
    worst = max(rule.values(), key=lambda pair: (pair.error != pair.error, pair.error))
    return Verdict(wrong, *worst, errors)


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
