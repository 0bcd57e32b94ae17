"""Test variants of the table of workloads as calls, and their comparison with eager code.

The tests of the contracts use this file.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.workloads.workload import Variant, Workload, tensors_of
from tigon.testing import assert_accurate

AnyCase = TypeVar("AnyCase", bound="VariantCase")


@dataclass(frozen=True)
class VariantCase:
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
        function = self.workload.function_in()
        assert function is not None, f"tigon has no {self.workload.name}"
        return self._with_options(function)

    @cached_property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._with_options(self.workload.reference)

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> list[Tensor]:
        return list(self._named_inputs(dtype, seed, device).values())

    def without_rows(self: AnyCase) -> AnyCase:
        """Return the case with zero rows, or with an empty sequence."""
        sizes = list(self.variant.sizes)
        sizes[self.workload.rows_axis] = 0
        return replace(self, variant=replace(self.variant, sizes=tuple(sizes)))

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

    Raises:
        AssertionError: An error exceeds the limit of `tigon.testing.assert_accurate`.
    """
    wide_tensors = [_as_fp64(x) for x in tensors]
    results = [
        outputs_and_gradients(f, x) for f, x in ((run, tensors), (reference, tensors), (reference, wide_tensors))
    ]
    for kind, (actual, eager, exact) in zip(("output", "gradient"), zip(*results, strict=True), strict=True):
        for i, triple in enumerate(zip(actual, eager, exact, strict=True)):
            smallest = 1.0 if loss and kind == "output" else 0.0
            if term_size and kind == "gradient":
                smallest = term_size
            elif term_size and loss:
                smallest = 4.0
            assert_accurate(*_where_fp64_exists(triple), smallest=smallest, msg=f"{kind} {i}")


def _as_fp64(x: Tensor) -> Tensor:
    (x_host,) = _where_fp64_exists([x.detach()])
    return x_host.double().requires_grad_(x.requires_grad) if x.is_floating_point() else x_host


def _where_fp64_exists(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the tensors, or their copies on the CPU if their device, the GPU of a Mac, has no fp64."""
    return [x.cpu() if x.device.type == "mps" else x for x in tensors]
