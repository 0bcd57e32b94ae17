"""The cases of `benchmarks.ops`: the workloads at the shapes of real models."""

from dataclasses import replace

import torch

from benchmarks.workloads import WORKLOADS, Case, Inputs, Workload

# The ops that are measured. An op is measured if its workload has shapes for the benchmark.
OPS: dict[str, Workload] = {name: workload for name, workload in WORKLOADS.items() if workload.bench_shapes}

# First the cases of models, then small ones for a CPU, then those that vary one size.
CASES: tuple[Case, ...] = tuple(
    sorted(
        (replace(case, op=op) for op, workload in OPS.items() for case in workload.bench_shapes),
        key=lambda case: ("small" in case.tags) + 2 * ("sweep" in case.tags),
    )
)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    form = {"ignored": case.ignored, "skewed": case.skewed}
    inputs = OPS[case.op].make_inputs(case.shape, case.dtype, device, seed=seed, options=case.options, form=form)
    for name in inputs.grad_names if case.no_grad else case.frozen:
        inputs.tensors[name].requires_grad_(False)
    return inputs


def halve_rows(case: Case) -> Case:
    """Return the case with half the rows, tokens or sequence, for checks that do not fit into memory."""
    axis = OPS[case.op].rows_axis
    return replace(case, shape=tuple(max(1, size // 2) if i == axis else size for i, size in enumerate(case.shape)))


def select(ops: str | None, cases: str) -> list[Case]:
    """Return the cases of `ops` (None: all) that match `cases` (tags or parts of a name); commas separate both.

    A word that is a tag selects by tag, and "all" selects all cases. Any other word selects the names it is a part of.

    >>> [case.name for case in select("rope", "small")]
    ['rope/small/1x256x8x2x64']
    """
    requested_ops = split_words(ops) if ops else list(OPS)
    for op in requested_ops:
        if op not in OPS:
            raise ValueError(f"bench: ops must be among {', '.join(OPS)}, got {op!r}")
    tags = {tag for case in CASES for tag in case.tags}
    words = split_words(cases)

    def matches(case: Case) -> bool:
        return any(word == "all" or (word in case.tags if word in tags else word in case.name) for word in words)

    matching_cases = [case for case in CASES if case.op in requested_ops and matches(case)]
    if not matching_cases:
        raise ValueError(
            f"bench: cases must match a tag ({', '.join(sorted(tags))}) or a part of a name, "
            f"got {cases!r} within ops {', '.join(requested_ops)}"
        )
    return matching_cases


def split_words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
