"""The speed of every op on the device, beside eager code and beside the device's own copy and matrix product.

The measurement is that of `benchmarks.ops`, with fewer calls and at most `MOST_BYTES` or `MOST_FLOPS` in one pass. An
op whose result is wrong at this size is not timed, and its check fails.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.ops import providers
from benchmarks.ops.cases import CASES, OPS, Case
from benchmarks.ops.measure import Roofline, make_meter
from benchmarks.ops.runner import BenchRow, run_case
from tigon.cli.check.outcome import LONGEST_NOTE, CheckOutcome, Clock

PART = "speed"
# These take about 0.2 ms and 3 ms on an H200, and ten times as long on a small card. Exact results take far longer.
MOST_BYTES, MOST_FLOPS = 2**30, 2 * 10**12
# The tags of a case, the most wanted one first.
TAGS = ("roofline", "first-light", "linear", "more", "sweep")
# The part of the usual number of calls.
SHARE_OF_CALLS = 0.2


@dataclass(frozen=True)
class OpSpeed:
    """The outcome of the check of an op at a large size, and its row of the benchmark beside that of eager code."""

    outcome: CheckOutcome
    row: BenchRow
    eager: BenchRow


def speed_cases(ops: list[str] | None) -> list[Case]:
    """Return one case of each op, as large as the limits allow.

    >>> [case.name for case in speed_cases(["rms_norm"])]
    ['rms_norm/llama-3-8b/16384x4096']
    """
    cases = []
    for op in OPS:
        tagged = ((tag, case) for tag in TAGS for case in CASES if case.op == op and tag in case.tags)
        case = next((case for _, case in tagged if not case.no_grad), None)
        if case is None or (ops is not None and op not in ops):
            continue
        while (case.bytes or 0) > MOST_BYTES or (case.flops or 0) > MOST_FLOPS:
            case = case.smaller()
        cases.append(case)
    return cases


def measure_speed(
    cases: list[Case], device: torch.device, clock: Clock, share: float, show_roofline: Callable[[Roofline], None]
) -> Iterator[OpSpeed | CheckOutcome]:
    """Yield the speed of each case, or a skipped outcome after this share of the time.

    If the copy or the product of the device cannot be measured, every case has failed.
    """
    try:
        meter = make_meter(device)
        meter.busy_ms *= SHARE_OF_CALLS
        roofline = meter.roofline()
    # The run ends with the report of the other parts, whatever the driver or the profiler raises here.
    except Exception as problem:
        note = f"the copy and the matrix product were not measured: {type(problem).__name__}: {problem}"
        yield from (CheckOutcome(PART, case.op, case.name, "failed", note[:LONGEST_NOTE]) for case in cases)
        return
    show_roofline(roofline)
    for case in cases:
        if clock.has_passed(share):
            yield CheckOutcome(PART, case.op, case.name, "skipped", "no time left: see --seconds")
            continue
        start = clock.seconds
        row, eager = run_case(case, providers.select(case.op, "tigon,eager"), meter, roofline, rounds=1)
        note = "" if row.status == "ok" else f"{row.status}: {row.note}"
        status = "failed" if row.failed else "passed" if row.status == "ok" else "skipped"
        yield OpSpeed(
            CheckOutcome(PART, case.op, case.name, status, note, round(clock.seconds - start, 3)),  # type: ignore[arg-type]
            row,
            eager,
        )
