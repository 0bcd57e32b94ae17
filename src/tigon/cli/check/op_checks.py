"""The accuracy of every op on the device: the test variants of the table of workloads, and wider inputs.

The result of an op and its gradients are compared with an exact result. The error of eager code in the same dtype sets
the limit (`tigon.testing.assert_accurate`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.workloads import WORKLOADS, Variant
from benchmarks.workloads.variant_case import VariantCase, assert_as_accurate_as_eager
from tigon.cli.check.outcome import CheckOutcome, Clock, run_check

PART = "ops"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class OpCheck:
    """One variant of an op in one dtype."""

    case: VariantCase
    dtype: torch.dtype

    @property
    def name(self) -> str:
        words = (self.case.variant.name, "x".join(map(str, self.case.variant.sizes)), str(self.dtype)[6:])
        return " ".join(word for word in words if word)

    def outcome(self, device: torch.device) -> CheckOutcome:
        """Compare the op with eager code on the device."""
        return run_check(PART, self.case.workload.name, self.name, lambda: self._compare(device))

    def _compare(self, device: torch.device) -> None:
        # The inputs are the same on every device, so that reports of two devices can be compared.
        tensors = [_move(x, device) for x in self.case.inputs(self.dtype)]
        workload, variant = self.case.workload, self.case.variant
        assert_as_accurate_as_eager(self.case.run, self.case.reference, tensors, workload.is_loss, variant.term_size)


def _move(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().to(device).requires_grad_(x.requires_grad)


def op_checks(ops: list[str] | None, *, runs_kernels: bool) -> list[OpCheck]:
    """Return the checks, the most telling ones first: a run that is short of time ends with the rare cases.

    Where kernels run, each op is also checked at the small sizes of the benchmark, which need several programs. Without
    kernels these sizes would compare the reference with itself, at length.
    """
    workloads = [workload for name, workload in WORKLOADS.items() if ops is None or name in ops]
    checks = [
        (dtype_rank + (variant_rank > 0), OpCheck(VariantCase(workload, variant), dtype))
        for workload in workloads
        for variant_rank, variant in enumerate(workload.test_variants)
        for dtype_rank, dtype in enumerate(DTYPES)
    ]
    for workload in workloads if runs_kernels else ():
        shape = next((shape for shape in workload.bench_shapes if "small" in shape.tags), None)
        if shape is not None:
            case = VariantCase(workload, Variant("", shape.sizes, shape.options))
            checks.append((1, OpCheck(case, torch.bfloat16)))
    return [check for _, check in sorted(checks, key=lambda pair: pair[0])]


def check_ops(checks: list[OpCheck], device: torch.device, clock: Clock, share: float) -> Iterator[CheckOutcome]:
    """Yield the outcome of each check. After this share of the time, the other checks are skipped."""
    for check in checks:
        if clock.has_passed(share):
            yield CheckOutcome(PART, check.case.workload.name, check.name, "skipped", "no time left: see --seconds")
        else:
            yield check.outcome(device)
