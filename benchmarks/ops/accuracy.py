"""The check of a provider: its outputs and gradients are compared with an exact result, and eager code sets the limit.

|actual - exact| <= 2 |eager - exact| + 2 units in the last place          (`tigon.testing.assert_accurate`)

The units are those of the dtype of eager code, so a loss in half precision gets no larger tolerance.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.eager import eager_code, reference, softcapped
from benchmarks.ops.providers import Provider, Run
from benchmarks.workloads import Case, Inputs
from tigon.testing import assert_accurate

# The key of a tensor is "output 0" or "gradient of x".
Results = dict[str, Tensor]

# These losses of logits have their exact results in fp64, because eager code computes them in fp32.
IN_FP64 = ("cross_entropy", "linear_cross_entropy", "kl_div", "jsd", "tvd")
# The oracle judges this many elements at once. It holds about ten fp64 copies of them.
JUDGED_ELEMENTS = 2**26


class BoundProvider:
    """A provider with its inputs. A call runs forward and backward, or forward alone if no input needs a gradient. The
    tensors that the provider overwrites are copies, which `restore` resets."""

    def __init__(self, provider: Provider, run: Run, inputs: Inputs) -> None:
        self._provider, self._run, self._pristine = provider, run, inputs
        self._inputs = inputs.map(lambda name, x: x.clone() if name in provider.overwrites else x)

    @property
    def gradient_bytes(self) -> int:
        return self._inputs.gradient_bytes

    @torch.no_grad()
    def restore(self) -> None:
        """Reset the tensors that a call has overwritten."""
        inputs, pristine = self._inputs, self._pristine
        pairs = [
            (inputs.tensors[name], pristine.tensors[name]) for name in self._provider.overwrites if name != "upstream"
        ]
        if "upstream" in self._provider.overwrites:
            pairs += zip(inputs.upstream, pristine.upstream, strict=True)
        for copy, source in pairs:
            copy.copy_(source)

    def __call__(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs, and the gradients of the inputs that need one."""
        inputs = self._inputs
        leaves = [inputs.tensors[name] for name in inputs.grad_names]
        with torch.set_grad_enabled(bool(leaves)):
            outputs = self._run(*inputs.tensors.values())
        if not self._provider.autograd:
            return (), outputs
        if not leaves:
            return outputs, ()
        # .backward() may copy a gradient into .grad, which does not happen to the gradient of an activation in a model.
        differentiable = outputs[: len(inputs.upstream) or 1]
        return outputs, torch.autograd.grad(differentiable, leaves, inputs.upstream or None)

    def results(self) -> Results:
        """Return the outputs and gradients of one call by name."""
        outputs, gradients = self()
        results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        named_gradients = zip(self._inputs.grad_names, gradients, strict=True)
        return results | {f"gradient of {name}": gradient for name, gradient in named_gradients}


def eager_results(case: Case, inputs: Inputs) -> Results:
    """Return the results of eager code in the dtype of the case. Its error sets the limit."""
    return BoundProvider(Provider("eager", reference), eager_code(case.op)(case), inputs).results()


def exact_results(case: Case, inputs: Inputs) -> Results:
    """Compute the reference in fp32, or in fp64 for some losses and if the case, logits or a gradient are in fp32."""
    has_fp32_logits = case.options.get("fp32_logits") or case.options.get("fp32_products")
    has_fp32 = has_fp32_logits or any(inputs.tensors[name].dtype == torch.float32 for name in inputs.grad_names)
    needs_fp64 = has_fp32 or case.dtype == torch.float32 or case.op in IN_FP64
    dtype = torch.float64 if needs_fp64 else torch.float32
    wide = inputs.map(lambda _, x: x.to(dtype) if x.is_floating_point() else x)
    return BoundProvider(Provider("exact", reference), reference(case), wide).results()


@torch.no_grad()
def typical_loss_error(case: Case, inputs: Inputs) -> float:
    """Return the standard error of a mean loss whose logits were rounded, with independent errors of the tokens. It is
    0 for ops that round no logits."""
    if case.op != "linear_cross_entropy":
        return 0.0
    x, weight, target = (inputs.tensors[name] for name in ("input", "linear_weight", "target"))
    rounded, exact = (
        F.cross_entropy(softcapped(logits, case.options.get("softcap")).double(), target, reduction="none")
        for logits in (F.linear(x, weight), F.linear(x.double(), weight.double()))
    )
    return ((rounded - exact).square().sum() ** 0.5 / (target >= 0).sum()).item()


class Errors(NamedTuple):
    """The relative errors |x - exact| / |exact| of one tensor in the 2-norm: of the provider and of eager code."""

    error: float
    eager_error: float

    @property
    def ratio(self) -> float:
        """Return the ratio of the two errors, NaN if eager code is exact."""
        return self.error / self.eager_error if self.eager_error else float("nan")


@dataclass(frozen=True)
class Verdict:
    """The reason why a provider is wrong, or "", the errors of its worst tensor, and those of each tensor by name."""

    wrong: str
    error: float = float("nan")
    eager_error: float = float("nan")
    errors: dict[str, Errors] = field(default_factory=dict)


def judge(actual: Results, eager: Results, exact: Results, typical: float = 0.0) -> Verdict:
    """Compare every output and gradient, and name the first that breaks the rule. Eager code can compute a single
    number exactly by chance, and then its error sets no useful limit. For a loss, the error of eager code therefore
    counts as at least `typical`, its standard error, in the ratios, and as at least twice `typical` in the rule."""
    wrong = ""
    errors: dict[str, Errors] = {}
    limits: dict[str, Errors] = {}
    for name, exact_value in exact.items():
        if name not in actual:
            return Verdict(f"{name}: missing")
        value, eager_value = actual[name], eager[name]
        if value.shape != exact_value.shape:
            return Verdict(f"{name}: shape {tuple(value.shape)} for {tuple(exact_value.shape)}")
        error, eager_error = _relative_error(value, exact_value), _relative_error(eager_value, exact_value)
        least_error = 0.0
        if typical and exact_value.dim() == 0:
            least_error = typical / exact_value.abs().item()
            distance = max(abs(eager_value.item() - exact_value.item()), 2 * typical)
            eager_value = (exact_value + distance).to(eager_value.dtype)
        errors[name] = Errors(error, max(eager_error, least_error))
        limits[name] = Errors(error, max(eager_error, 2 * least_error))
        common = torch.promote_types(value.dtype, eager_value.dtype)
        wrong = wrong or _first_error(name, value.to(common), eager_value.to(common), exact_value)
    # A NaN compares as neither larger nor smaller, so the key puts it first.
    worst = max(limits.values(), key=lambda pair: (pair.error != pair.error, pair.error))
    return Verdict(wrong, *worst, errors)


def _first_error(name: str, *tensors: Tensor) -> str:
    """Return the message of the oracle about the actual, the eager and the exact tensor; "" if the first is right."""
    smallest = 1.0 if tensors[0].dim() == 0 else 0.0
    parts = zip(*(x.reshape(-1).split(JUDGED_ELEMENTS) for x in tensors), strict=True)
    try:
        for part in [tensors] if tensors[0].numel() <= JUDGED_ELEMENTS else parts:
            assert_accurate(*part, smallest=smallest, msg=name)
    except AssertionError as problem:
        return " ".join(str(problem).split())
    return ""


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    distance = torch.linalg.vector_norm(actual.to(exact.dtype) - exact)
    return (distance / torch.linalg.vector_norm(exact)).item()
