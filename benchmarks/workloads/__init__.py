"""One table of workloads: each op with its reference, its inputs, and the sizes for tests, compiler and benchmark.

Three users share the table. The contract tests (`tests/op_cases.py`) run every op at small, odd sizes. The compiler
(`benchmarks.compile`) compiles the kernels of every op at the sizes of current models. The benchmark
(`benchmarks.ops`) times every op at the shapes of named models. All three make the inputs by `Workload.make_inputs`.

`workload` has the types and `inputs` draws the tensors. The other files hold one entry per op, one file for each family
of `tigon.ops`. A new op is one entry in the file of its family.
"""

from benchmarks.workloads import (
    adapters,
    delta_rules,
    divergences,
    experts,
    fp8,
    head,
    logits,
    losses,
    mixers,
    mlps,
    norms,
    rotary,
    ssd,
)
from benchmarks.workloads.inputs import InputMaker, Inputs
from benchmarks.workloads.workload import Case, Variant, Workload

__all__ = ["WORKLOADS", "Case", "InputMaker", "Inputs", "Variant", "Workload"]

# The order is that of the cases in a report of the benchmark.
_FAMILIES = (
    norms, rotary, mixers, delta_rules, ssd, mlps, fp8, adapters, experts, logits, head, divergences, losses
)  # fmt: skip

WORKLOADS: dict[str, Workload] = {workload.name: workload for family in _FAMILIES for workload in family.WORKLOADS}
