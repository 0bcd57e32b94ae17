"""The test variants of the table of workloads as cases, which the tests of the contracts share, and their checks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

import tigon
from tigon.testing import assert_accurate
from tigon.tools.workloads import WORKLOADS, Variant, Workload
from tigon.tools.workloads.workload import tensors_of

# The interpreter truncates bf16 stores and computes products of bf16 wrongly, so it does not run cases in bf16.
INTERPRETED = tigon.runtime.device.INTERPRETED
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """An op with its options and inputs. `run` and `reference` take the tensors of `inputs` in their order."""

    workload: Workload
    variant: Variant

    @property
    def name(self) -> str:
        return f"{self.workload.name} {self.variant.name}".strip()

    @property
    def is_reference_on_cpu(self) -> bool:
        """Return True if the op runs its reference on a CPU, so that the two cannot differ there."""
        return not self.workload.has_cpu_code

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._with_options(self.workload.function_in())

    @cached_property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._with_options(self.workload.reference)

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = DEVICE) -> list[Tensor]:
        return list(self._named_inputs(dtype, seed, device).values())

    def without_rows(self) -> "Case":
        """Return the case with zero rows, or with an empty sequence."""
        sizes = list(self.variant.sizes)
        sizes[self.workload.rows_axis] = 0
        return Case(self.workload, replace(self.variant, sizes=tuple(sizes)))

    def _named_inputs(self, dtype: torch.dtype, seed: int, device: str) -> dict[str, Tensor]:
        return self.workload.make_inputs(
            self.variant.sizes, dtype, torch.device(device), seed=seed, options=self.variant.options,
            form=self.variant.form,
        ).tensors  # fmt: skip

    def _with_options(self, function: Callable) -> Callable[..., tuple[Tensor, ...]]:
        """Return a function of the tensors that passes them to `function` by name, together with the options."""
        names, options = tuple(self._named_inputs(torch.float32, 0, "cpu")), dict(self.variant.options)

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tensors_of(function(**dict(zip(names, tensors, strict=True)), **options))

        return call


def as_list(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs of an op that has one or several."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def outputs_and_gradients(
    function: Callable, tensors: list[Tensor], seed: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs and the gradients of the inputs that need one.

    The upstream gradients are random and the same for the same seed.
    """
    outputs = as_list(function(*tensors))
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    leaves = [x for x in tensors if x.requires_grad]
    pairs = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.requires_grad]
    return outputs, list(torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs]))


def assert_as_accurate_as_eager(
    run: Callable, reference: Callable, tensors: list[Tensor], loss: bool = False, term_size: float = 0.0
) -> None:
    """Check every output and gradient by the oracle.

    The reference computes the eager result in the dtype of the inputs, and the exact result in fp64. If the gradient is
    a difference of terms of the size `term_size`, its tolerance is in units of this size, and the tolerance of the loss
    is in units of 4.
    """
    wide_tensors = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in tensors
    ]
    results = [
        outputs_and_gradients(f, x) for f, x in ((run, tensors), (reference, tensors), (reference, wide_tensors))
    ]
    for kind, (actual, eager, exact) in zip(("output", "gradient"), zip(*results, strict=True), strict=True):
        for i, triple in enumerate(zip(actual, eager, exact, strict=True)):
            smallest = 1.0 if loss and kind == "output" else 0.0
            if term_size:
                smallest = 4.0 if kind == "output" else term_size
            assert_accurate(*triple, smallest=smallest, msg=f"{kind} {i}")


CASES = [Case(workload, variant) for workload in WORKLOADS.values() for variant in workload.test_variants]


def every_case(test: Callable) -> Callable:
    """Run a test on every case. A CPU without kernels leaves out the cases that run the reference there."""
    marks = {True: pytest.mark.kernels, False: ()}
    params = [pytest.param(case, marks=marks[case.is_reference_on_cpu], id=case.name) for case in CASES]
    return pytest.mark.parametrize("case", params)(test)


def one_in(parts: int, **axes: dict | list) -> Callable:
    """Parametrise a test with the product of the axes, of which `make test` runs one case in `parts`.

    The cases whose indices add up to a multiple of `parts` run there: every value of every axis is among them, and so
    is every pair of values if another axis has at least `parts` values. `make test-thorough` runs the others.

    Args:
        parts: `make test` runs one case out of this number.
        axes: The values of each argument of the test: a list, or a dict from the id of a value to the value.
    """
    values_with_ids = [
        list(x.items()) if isinstance(x, dict) else [(str(value), value) for value in x] for x in axes.values()
    ]
    params = []
    for case in itertools.product(*(list(enumerate(values)) for values in values_with_ids)):
        is_quick = sum(i for i, _ in case) % parts == 0
        values = [value for _, (_, value) in case]
        name = "-".join(id for _, (id, _) in case)
        params.append(pytest.param(*values, id=name, marks=() if is_quick else pytest.mark.thorough))
    return pytest.mark.parametrize(tuple(axes), params)
