"""One case of the benchmark: check every provider, then measure the providers in turn, round by round."""

import contextlib
import gc
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from benchmarks.ops.accuracy import BoundProvider, Results, eager_results, exact_results, judge, typical_loss_error
from benchmarks.ops.cases import OPS, halve_rows, make_inputs
from benchmarks.ops.measure import Meter, Roofline, Samples
from benchmarks.ops.providers import Provider, Run, Unsupported
from benchmarks.workloads import Case, Inputs

Result = TypeVar("Result")


@dataclass
class BenchRow:
    """One provider on one case, as the report shows it. None means "not measured". `status` is "ok" (measured),
    "missing" (not installed, or no GPU), "unsupported", "wrong" (Tigon, which is then not measured), "error" or "out of
    memory"; `note` says more. Times are medians in milliseconds. `accurate` is the result of the check, `error` the
    relative error of its worst tensor and `eager_error` that of eager code; `errors` has those of each output and
    gradient, and their ratio. Where matrix products are the bound, `products_ratio` is the time divided by that of the
    provider "products" in the same run, and `peak_above_gradients_mib` is the peak less the gradients that the call
    returns."""

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

    def end(self, status: str, note: str) -> None:
        self.status, self.note = status, note


def _reset_compiler() -> None:
    """Forget all graphs that `torch.compile` has made: they hold memory, and count toward the limit of recompilations.
    `torch.compiler.reset` would import Dynamo, which takes seconds, so it is called only if Dynamo is imported
    already."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def run_case(
    case: Case, providers: Iterable[Provider], meter: Meter, roofline: Roofline, rounds: int
) -> list[BenchRow]:
    """Check and measure `providers` on `case`, and return one row for each, even if it fails. If the provider "tigon"
    is wrong, it is not measured. A wrong peer is measured, and its row says that it is wrong."""
    _reset_compiler()
    run = _CaseRun(case, providers, meter)
    try:
        run.check()
        run.measure(rounds)
    # The inputs cannot be made, or a reference fails.
    except Exception as problem:
        for entry in run.active_entries():
            entry.row.end("error", _describe(problem))
    rows = [_finish(entry, roofline) for entry in run.entries]
    products_ms = next((row.time_ms for row in rows if row.provider == "products"), None)
    for row in rows:
        row.products_ratio = row.time_ms / products_ms if row.time_ms and products_ms else None
    del run
    _free_memory()
    return rows


@dataclass
class _ProviderRun:
    provider: Provider
    row: BenchRow
    run: Run | None = None
    samples: Samples = field(default_factory=Samples)
    calls: int = 1


@dataclass
class _Baseline:
    """The inputs of the check, and the results with which those of the providers are compared."""

    case: Case
    inputs: Inputs
    eager: Results
    exact: Results
    typical_error: float


class _CaseRun:
    """The providers of a case, which are loaded at first."""

    def __init__(self, case: Case, providers: Iterable[Provider], meter: Meter) -> None:
        self.case, self.meter = case, meter
        self.entries = [_ProviderRun(provider, self._row(provider)) for provider in providers]
        for entry in self.entries:
            self._attempt(entry, self._load)

    def active_entries(self) -> list[_ProviderRun]:
        return [entry for entry in self.entries if entry.row.status == "ok"]

    def _row(self, provider: Provider) -> BenchRow:
        case, workload = self.case, OPS[self.case.op]
        return BenchRow(
            case=case.name, op=case.op, family=workload.family or case.op, model=case.model, shape=case.shape,
            dtype=str(case.dtype).removeprefix("torch."), provider=provider.name, note=provider.note,
            bytes=workload.bytes_of(case), flops=workload.flops_of(case),
        )  # fmt: skip

    def _load(self, entry: _ProviderRun) -> None:
        if entry.provider.needs_gpu and self.meter.device.type != "cuda":
            entry.row.end("missing", "needs a GPU")
        else:
            entry.run = entry.provider.load(self.case)

    def _bind(self, entry: _ProviderRun, inputs: Inputs) -> BoundProvider:
        """Bind a provider to inputs. Copies and prepared operands live as long as the result."""
        assert entry.run is not None
        return BoundProvider(entry.provider, entry.run, entry.provider.prepare(self.case, inputs))

    def _attempt(self, entry: _ProviderRun, action: Callable[[_ProviderRun], Result]) -> Result | None:
        """Call `action(entry)`. An error becomes the status of the row, and the result is then None."""
        try:
            return action(entry)
        except Unsupported as reason:
            end = "unsupported", str(reason)
        except ImportError as reason:
            end = "missing", f"not installed ({reason})"
        except torch.OutOfMemoryError:
            end = "out of memory", ""
        except Exception as problem:
            end = "error", _describe(problem)
        # Here, outside the handlers, the frames of the exception no longer hold tensors.
        entry.row.end(*end)
        entry.run = None
        _free_memory()
        return None

    def _expect(self, case: Case) -> _Baseline:
        """Compute the exact result and that of eager code."""
        inputs = make_inputs(case, self.meter.device, seed=1)
        exact = exact_results(case, inputs)
        return _Baseline(case, inputs, eager_results(case, inputs), exact, typical_loss_error(case, inputs))

    def _find_baseline(self) -> _Baseline | None:
        """Return what is expected, at fewer rows if memory runs out; None if nothing fits."""
        case = self.case
        for _ in range(6):
            with contextlib.suppress(torch.OutOfMemoryError):
                return self._expect(case)
            # Here, after the handler, the frames of the failed attempt no longer hold tensors.
            _free_memory()
            case = halve_rows(case)
        return None

    def check(self) -> None:
        baseline = self._find_baseline()
        if baseline is None:
            for entry in self.active_entries():
                if entry.provider.name == "tigon":
                    entry.row.end("out of memory", "the accuracy check does not fit: not timed")
                else:
                    entry.row.add_note("accuracy not checked: out of memory")
            return
        fingerprints = baseline.inputs.fingerprints()
        for entry in self.active_entries():
            if not entry.provider.autograd:
                continue
            self._attempt(entry, lambda entry: self._judge(entry, baseline))
            changed_names = {name for name, _ in baseline.inputs.fingerprints().items() ^ fingerprints.items()}
            if changed_names:
                # All providers share the inputs, so a provider that overwrites them must not be called again.
                if entry.row.status == "ok":
                    status = "wrong" if entry.provider.name == "tigon" else "error"
                    entry.row.end(status, f"not timed: writes over its inputs: {', '.join(sorted(changed_names))}")
                # The old inputs are released before the new ones are made.
                baseline.inputs = Inputs({})
                baseline.inputs = make_inputs(baseline.case, self.meter.device, seed=1)

    def _judge(self, entry: _ProviderRun, baseline: _Baseline) -> None:
        """Compare the results of a provider with the expected ones, and note the verdict in its row."""
        results, row = self._bind(entry, baseline.inputs).results(), entry.row
        # If a kernel has failed, this call raises its error.
        self.meter.synchronize()
        verdict = judge(results, baseline.eager, baseline.exact, baseline.typical_error)
        row.error, row.eager_error = _finite(verdict.error), _finite(verdict.eager_error)
        for name, errors in verdict.errors.items():
            values = {"error": errors.error, "eager_error": errors.eager_error, "ratio": errors.ratio}
            row.errors[name] = {key: _finite(value) for key, value in values.items()}
        row.accurate = not verdict.wrong
        if baseline.case is not self.case:
            row.add_note(f"checked at {'x'.join(map(str, baseline.case.shape))}")
        if verdict.wrong and row.provider == "tigon":
            row.end("wrong", f"not timed: {verdict.wrong}")
        elif verdict.wrong:
            row.add_note(f"inaccurate: {verdict.wrong}")

    def measure(self, rounds: int) -> None:
        """Warm up the providers, and measure each of them once a round."""
        inputs = make_inputs(self.case, self.meter.device)

        def warm_up(entry: _ProviderRun) -> None:
            bound = self._bind(entry, inputs)
            entry.calls = self.meter.calls(self.meter.warm_up(bound))
            entry.samples.peak_bytes = self.meter.peak_bytes(bound)
            entry.samples.gradient_bytes = bound.gradient_bytes

        def measure_round(entry: _ProviderRun) -> None:
            # Copies and prepared operands live for this round only, so memory holds those of one provider at a time.
            self.meter.measure_round(self._bind(entry, inputs), entry.calls, entry.samples)

        for entry in self.active_entries():
            self._attempt(entry, warm_up)
        for index in range(rounds):
            # Each round has another order, because a hot chip is slow and no provider should always follow the same.
            entries = self.active_entries()
            for entry in random.Random(index).sample(entries, len(entries)):
                self._attempt(entry, measure_round)


def _finish(entry: _ProviderRun, roofline: Roofline) -> BenchRow:
    row, samples = entry.row, entry.samples
    row.floor_ms = roofline.floor_ms(row.bytes, row.flops)
    if row.status == "ok":
        row.kernel_ms, row.wall_ms, row.host_ms = map(Samples.median, (samples.kernel, samples.wall, samples.host))
        row.samples = {"kernel": samples.kernel, "wall": samples.wall, "host": samples.host}
        row.percent_of_roofline = 100 * row.floor_ms / row.time_ms if row.time_ms else None
        if samples.peak_bytes is not None:
            row.peak_mib = samples.peak_bytes / 2**20
            row.peak_above_gradients_mib = row.peak_mib - samples.gradient_bytes / 2**20 if row.flops else None
    return row


def _finite(x: float) -> float | None:
    """Return a number, or None for one that is not finite, because JSON has no NaN."""
    return x if math.isfinite(x) else None


def _describe(problem: Exception) -> str:
    first_line = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first_line}"[:200]


def _free_memory() -> None:
    gc.collect()
    # After an illegal access every call fails, this one too. The rows that follow report it.
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()
