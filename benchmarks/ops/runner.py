"""One case of the benchmark: check every provider, then measure the providers in turn, round by round."""

import contextlib
import gc
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from benchmarks.ops.accuracy import (
    BoundProvider,
    Errors,
    Results,
    Verdict,
    eager_results,
    exact_results,
    judge,
    typical_loss_error,
)
from benchmarks.ops.cases import OPS, halve_rows, make_inputs
from benchmarks.ops.measure import Meter, Roofline, Samples
from benchmarks.ops.providers import Provider, Run, Unsupported
from benchmarks.workloads import Case, Inputs
from tigon.runtime.compat.graphs import reset_compiler

Result = TypeVar("Result")


@dataclass
class BenchRow:
    """One provider on one case, as the report shows it.

    `status` is "ok" (measured), "missing" (not installed, or no GPU), "unsupported", "wrong" (Tigon, which is then not
    measured), "error" or "out of memory"; `note` says more. Times are medians in milliseconds. `accurate` is the result
    of the check. `error` is the relative error of its worst tensor and `eager_error` that of eager code; `errors` has
    those of each output and gradient, and their ratio. None means "not measured".

    Where matrix products are the bound, `products_ratio` is the time divided by that of the provider "products" in the
    same run, and `peak_above_gradients_mib` is the peak less the gradients that the call returns.
    """

    case: str
    op: str
    family: str
    model: str
    shape: tuple[int, ...]
    dtype: str
    provider: str
    status: str = "ok"
    note: str = ""
    kernel_ms: float | None = None
    wall_ms: float | None = None
    host_ms: float | None = None
    peak_mib: float | None = None
    bytes: int | None = None
    flops: int | None = None
    floor_ms: float | None = None
    percent_of_roofline: float | None = None
    error: float | None = None
    eager_error: float | None = None
    accurate: bool | None = None
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    products_ratio: float | None = None
    peak_above_gradients_mib: float | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def time_ms(self) -> float | None:
        """Return the time that ranks the providers: kernel time on a GPU, wall time on a CPU."""
        return self.kernel_ms if self.kernel_ms is not None else self.wall_ms

    @property
    def is_peer(self) -> bool:
        """Return True if Tigon is compared with the provider, which is neither another revision nor the floor."""
        return self.provider.partition("@")[0] not in ("tigon", "products")

    @property
    def failed(self) -> bool:
        """Return True if the run must end with exit code 1: Tigon is wrong, raises or cannot be imported."""
        return self.provider == "tigon" and self.status in ("wrong", "error", "missing")

    def add_note(self, text: str) -> None:
        self.note = f"{self.note}; {text}" if self.note else text


@dataclass
class _Entry:
    """A provider during the run of a case."""

    provider: Provider
    row: BenchRow
    case: Case
    run: Run | None = None
    samples: Samples = field(default_factory=Samples)
    calls: int = 1

    @property
    def is_active(self) -> bool:
        return self.row.status == "ok"

    def bind(self, inputs: Inputs) -> BoundProvider:
        """Bind the provider to inputs. Copies and prepared operands live as long as the result."""
        assert self.run is not None
        return BoundProvider(self.provider, self.run, self.provider.prepare(self.case, inputs))


def run_case(
    case: Case, providers: Iterable[Provider], meter: Meter, roofline: Roofline, rounds: int
) -> list[BenchRow]:
    """Check and measure `providers` on `case`, and return one row for each, even if it fails.

    If the provider "tigon" is wrong, it is not measured. A wrong peer is measured, and its row says that it is wrong.
    """
    entries = [_Entry(provider, _row(case, provider), case) for provider in providers]
    # Graphs that were compiled for an earlier case hold memory, and count toward the limit of recompilations.
    reset_compiler()
    for entry in entries:
        _attempt(entry, meter, partial(_load, entry, case, meter))
    try:
        _check(case, entries, meter)
        _measure(case, entries, meter, rounds)
    # The inputs cannot be made, or a reference fails.
    except Exception as problem:
        for entry in entries:
            if entry.is_active:
                entry.row.status, entry.row.note = "error", _describe(problem)
    for entry in entries:
        entry.run = None
        _finish(entry, roofline)
    _compare_with_products([entry.row for entry in entries])
    _free(meter)
    return [entry.row for entry in entries]


def _row(case: Case, provider: Provider) -> BenchRow:
    return BenchRow(
        case=case.name, op=case.op, family=OPS[case.op].family or case.op, model=case.model, shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."), provider=provider.name, note=provider.note,
        bytes=OPS[case.op].bytes_of(case), flops=OPS[case.op].flops_of(case),
    )  # fmt: skip


def _load(entry: _Entry, case: Case, meter: Meter) -> None:
    if entry.provider.needs_gpu and meter.device.type != "cuda":
        entry.row.status, entry.row.note = "missing", "needs a GPU"
        return
    entry.run = entry.provider.load(case)


# --- check ---------------------------------------------------------------------------------------


@dataclass
class _Baseline:
    """The inputs of the check, and the results with which those of the providers are compared."""

    case: Case
    inputs: Inputs
    eager: Results
    exact: Results
    typical_error: float


def _prepare_check(case: Case, meter: Meter) -> _Baseline | None:
    """Compute the exact result and that of eager code, at fewer rows if they do not fit; None if nothing fits."""
    for _ in range(6):
        with contextlib.suppress(torch.OutOfMemoryError):
            return _expected_results(case, meter)
        # Here, after the handler, the frames of the failed attempt no longer hold tensors.
        _free(meter)
        case = halve_rows(case)
    return None


def _expected_results(case: Case, meter: Meter) -> _Baseline:
    inputs = make_inputs(case, meter.device, seed=1)
    exact = exact_results(case, inputs)
    return _Baseline(case, inputs, eager_results(case, inputs), exact, typical_loss_error(case, inputs))


def _check(case: Case, entries: list[_Entry], meter: Meter) -> None:
    """Check the results of every provider."""
    baseline = _prepare_check(case, meter)
    if baseline is None:
        for entry in entries:
            if entry.is_active and entry.provider.name == "tigon":
                entry.row.status, entry.row.note = "out of memory", "the accuracy check does not fit: not timed"
            elif entry.is_active:
                entry.row.add_note("accuracy not checked: out of memory")
        return
    checked_at = "" if baseline.case is case else "x".join(map(str, baseline.case.shape))
    fingerprints = baseline.inputs.fingerprints()
    for entry in entries:
        if not entry.is_active or not entry.provider.autograd:
            continue
        verdict = _attempt(entry, meter, partial(_verdict, entry, baseline, meter))
        if verdict is not None:
            _judge_row(entry.row, verdict, checked_at)
        new_fingerprints = baseline.inputs.fingerprints()
        overwritten_names = [
            name for name, fingerprint in fingerprints.items() if new_fingerprints[name] != fingerprint
        ]
        if overwritten_names:
            # All providers share the inputs, so a provider that overwrites them must not be called again.
            if entry.is_active:
                entry.row.status = "wrong" if entry.provider.name == "tigon" else "error"
                entry.row.note = f"not timed: writes over its inputs: {', '.join(overwritten_names)}"
            # The old inputs are released before the new ones are made.
            baseline.inputs = Inputs({})
            baseline.inputs = make_inputs(baseline.case, meter.device, seed=1)


def _verdict(entry: _Entry, baseline: _Baseline, meter: Meter) -> Verdict:
    results = entry.bind(baseline.inputs).results()
    # If a kernel has failed, this call raises its error.
    meter.synchronize()
    return judge(results, baseline.eager, baseline.exact, baseline.typical_error)


def _judge_row(row: BenchRow, verdict: Verdict, checked_at: str) -> None:
    row.error, row.eager_error = _finite(verdict.error), _finite(verdict.eager_error)
    row.errors = {name: _as_dict(errors) for name, errors in verdict.errors.items()}
    row.accurate = not verdict.wrong
    if checked_at:
        row.add_note(f"checked at {checked_at}")
    if verdict.wrong and row.provider == "tigon":
        row.status, row.note = "wrong", f"not timed: {verdict.wrong}"
    elif verdict.wrong:
        row.add_note(f"inaccurate: {verdict.wrong}")


def _as_dict(errors: Errors) -> dict[str, float | None]:
    values = {"error": errors.error, "eager_error": errors.eager_error, "ratio": errors.ratio}
    return {name: _finite(value) for name, value in values.items()}


def _finite(x: float) -> float | None:
    # JSON has no NaN.
    return x if math.isfinite(x) else None


# --- measure -------------------------------------------------------------------------------------


def _measure(case: Case, entries: list[_Entry], meter: Meter, rounds: int) -> None:
    inputs = make_inputs(case, meter.device)
    for entry in entries:
        if entry.is_active:
            _attempt(entry, meter, partial(_warm_up, entry, inputs, meter))
    for index in range(rounds):
        # Each round has another order, because a hot chip is slow and no provider should always follow the same one.
        for entry in random.Random(index).sample(entries, len(entries)):
            if entry.is_active:
                _attempt(entry, meter, partial(_round, entry, inputs, meter))


def _warm_up(entry: _Entry, inputs: Inputs, meter: Meter) -> None:
    bound = entry.bind(inputs)
    entry.calls = meter.calls(meter.warm_up(bound))
    entry.samples.peak_bytes = meter.peak_bytes(bound)
    entry.samples.gradient_bytes = bound.gradient_bytes


def _round(entry: _Entry, inputs: Inputs, meter: Meter) -> None:
    # Copies and prepared operands live for this round only, so memory holds those of one provider at a time.
    meter.measure_round(entry.bind(inputs), entry.calls, entry.samples)


def _finish(entry: _Entry, roofline: Roofline) -> None:
    row, samples = entry.row, entry.samples
    row.floor_ms = roofline.floor_ms(row.bytes, row.flops)
    if not entry.is_active:
        return
    row.kernel_ms = Samples.median(samples.kernel)
    row.wall_ms, row.host_ms = Samples.median(samples.wall), Samples.median(samples.host)
    row.peak_mib = None if samples.peak_bytes is None else samples.peak_bytes / 2**20
    if row.flops and samples.peak_bytes is not None:
        row.peak_above_gradients_mib = (samples.peak_bytes - samples.gradient_bytes) / 2**20
    row.samples = {"kernel": samples.kernel, "wall": samples.wall, "host": samples.host}
    if row.time_ms:
        assert row.floor_ms is not None
        row.percent_of_roofline = 100 * row.floor_ms / row.time_ms


def _compare_with_products(rows: list[BenchRow]) -> None:
    products = next((row for row in rows if row.provider == "products" and row.time_ms), None)
    if products is None or not products.time_ms:
        return
    for row in rows:
        if row.time_ms and (row.kernel_ms is None) == (products.kernel_ms is None):
            row.products_ratio = row.time_ms / products.time_ms


# --- errors --------------------------------------------------------------------------------------


def _attempt(entry: _Entry, meter: Meter, action: Callable[[], Result]) -> Result | None:
    """Run `action`. An error becomes the status of the row, and the result is then None."""
    try:
        return action()
    except Unsupported as reason:
        status, note = "unsupported", str(reason)
    except ImportError as reason:
        status, note = "missing", f"not installed ({reason})"
    except torch.OutOfMemoryError:
        status, note = "out of memory", ""
    except Exception as problem:
        status, note = "error", _describe(problem)
    # Here, outside the handlers, the frames of the exception no longer hold tensors.
    entry.row.status, entry.row.note = status, note
    entry.run = None
    _free(meter)
    return None


def _describe(problem: Exception) -> str:
    first_line = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first_line}"[:200]


def _free(meter: Meter) -> None:
    gc.collect()
    if meter.device.type == "cuda":
        # After an illegal access every call fails, this one too. The rows that follow report it.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
