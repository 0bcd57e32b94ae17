"""The test variants of the table of workloads as cases, which the tests of the contracts share, and their checks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from benchmarks.workloads import WORKLOADS
from variant_case import VariantCase, as_list, assert_as_accurate_as_eager, outputs_and_gradients

__all__ = [
    "CASES", "DEVICE", "DTYPES", "INTERPRETED", "Case", "as_list", "assert_as_accurate_as_eager", "assert_refused",
    "every_case", "every_op", "one_in", "outputs_and_gradients", "saved_tensors",
]  # fmt: skip

# The interpreter truncates bf16 stores and computes products of bf16 wrongly, so it does not run cases in bf16.
INTERPRETED = tigon.runtime.device.INTERPRETED
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case(VariantCase):
    """A case whose inputs are by default on the device of this run."""

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = DEVICE) -> list[Tensor]:
        return super().inputs(dtype, seed, device)


CASES = [Case(workload, variant) for workload in WORKLOADS.values() for variant in workload.test_variants]


def every_case(test: Callable) -> Callable:
    """Run a test on every case. A CPU without kernels leaves out the cases that run the reference there."""
    marks = {True: pytest.mark.kernels, False: ()}
    params = [pytest.param(case, marks=marks[case.is_reference_on_cpu], id=case.name) for case in CASES]
    return pytest.mark.parametrize("case", params)(test)


def every_op(test: Callable) -> Callable:
    """Run a test on every case, but in the interpreter on two variants of each op, which share its launches.

    `make test` runs the first variant there, and `make test-thorough` the last one.
    """
    if not INTERPRETED:
        return every_case(test)
    params = []
    for case in CASES:
        first, *others = case.workload.test_variants
        if case.variant is first:
            params.append(pytest.param(case, id=case.name))
        elif case.variant is others[-1]:
            params.append(pytest.param(case, id=case.name, marks=pytest.mark.thorough))
    return pytest.mark.parametrize("case", params)(test)


def assert_refused(op: Callable, arguments: dict[str, Any], changes: dict[str, dict[str, Any]]) -> None:
    """Check that the op computes these arguments, and refuses each change of them by a message that names it.

    Args:
        op: The op or the module.
        arguments: The arguments of a call that works.
        changes: For the rest of each message, a regular expression, the arguments that it refuses.
    """
    op(**arguments)
    for message, change in changes.items():
        with pytest.raises((TypeError, ValueError), match=f"^{op.__name__}: {message}"):
            op(**(arguments | change))


def saved_tensors(run: Callable[[], object]) -> list[Tensor]:
    """Return the tensors that a call saves for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved


def one_in(parts: int, **axes: dict | list) -> Callable:
    """Parametrise a test with a part of the product of the axes: `make test` runs one case in `parts`.

    The cases whose indices add up to a multiple of `parts` run there: every value of every axis is among them, and so
    is every pair of values if another axis has at least `parts` values. `make test-thorough` runs as many again, the
    cases whose sum is one more, so that each of these pairs meets two values of the other axis.

    Args:
        parts: `make test` runs one case out of this number.
        axes: The values of each argument of the test: a list, or a dict from the id of a value to the value.
    """
    values_with_ids = [
        list(x.items()) if isinstance(x, dict) else [(str(value), value) for value in x] for x in axes.values()
    ]
    params = []
    for case in itertools.product(*(list(enumerate(values)) for values in values_with_ids)):
        remainder = sum(i for i, _ in case) % parts
        if remainder > 1:
            continue
        values = [value for _, (_, value) in case]
        name = "-".join(id for _, (id, _) in case)
        params.append(pytest.param(*values, id=name, marks=pytest.mark.thorough if remainder else ()))
    return pytest.mark.parametrize(tuple(axes), params)
