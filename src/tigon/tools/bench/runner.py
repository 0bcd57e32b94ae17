"""The run: for each case, check every provider, then measure those that may be measured, round by round, in turn."""

import contextlib
import gc
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import torch

from tigon.tools.bench.accuracy import Bound, Errors, Verdict, eager_results, exact_results, judge, typical_loss_error
from tigon.tools.bench.cases import Case
from tigon.tools.bench.inputs import Inputs
from tigon.tools.bench.measure import Meter, Roofline, Samples
from tigon.tools.bench.providers import Provider, Run, Unsupported

__all__ = ["Row", "run_case"]

Tell = Callable[[str], None]  # receives what is being done now


@dataclass
class Row:
    """One provider on one case, as it stands in the report.

    `status` is "ok" (measured), "missing" (not installed or no GPU), "unsupported", "wrong" (ours, refused), "error" or
    "out of memory"; `note` says more. Times are medians in milliseconds; `accurate` is the verdict of the check, whose
    worst tensor has the relative errors `error` and, of eager code, `eager_error`; `errors` has those of each output
    and gradient, and their ratio. None is "not measured".

    Where matrix products are the bound, `products_ratio` is the time over that of the provider "products" in the same
    run, and `peak_above_gradients_mib` the peak less the gradients that are returned.
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
    kernel_source: str = ""
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
        """What providers are ranked by: kernel time on a GPU, wall time on a CPU."""
        return self.kernel_ms if self.kernel_ms is not None else self.wall_ms

    @property
    def is_peer(self) -> bool:
        """Whether it is what Tigon is compared with: no other revision, and not the floor."""
        return self.provider.partition("@")[0] not in ("tigon", "products")

    @property
    def failed(self) -> bool:
        """Whether the run must end with exit code 1: our own kernel is wrong, raised or could not be imported."""
        return self.provider == "tigon" and self.status in ("wrong", "error", "missing")

    def add_note(self, text: str) -> None:
        self.note = f"{self.note}; {text}" if self.note else text

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass
class _Entry:
    """A provider under way."""

    provider: Provider
    row: Row
    case: Case
    run: Run | None = None
    samples: Samples = field(default_factory=Samples)
    calls: int = 1

    @property
    def alive(self) -> bool:
        return self.row.status == "ok"

    def bound(self, inputs: Inputs) -> Bound:
        """A new one: what was prepared or copied for it lives as long as it does."""
        return Bound(self.provider, self.run, self.provider.prepare(self.case, inputs))


def run_case(
    case: Case,
    providers: Iterable[Provider],
    meter: Meter,
    roofline: Roofline,
    rounds: int,
    tell: Tell = lambda _: None,
) -> list[Row]:
    """Check and measure `providers` on `case`; one row each, whatever happens to it.

    A provider named "tigon" that is wrong is not measured. A peer that is wrong is, and its row says so.
    """
    entries = [_Entry(provider, _row(case, provider), case) for provider in providers]
    # Graphs compiled for an earlier case hold memory, and count toward the limit of recompilations.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    for entry in entries:
        _attempt(entry, meter, lambda entry=entry: _load(entry, case, meter))
    for step in (lambda: _check(case, entries, meter, tell), lambda: _measure(case, entries, meter, rounds, tell)):
        problem = _attempt_all(step)
        for entry in entries:
            if problem and entry.alive:
                entry.row.status, entry.row.note = "error", problem
    for entry in entries:
        entry.run = None
        _finish(entry, roofline)
    _compare_with_products([entry.row for entry in entries])
    _free(meter)
    return [entry.row for entry in entries]


def _row(case: Case, provider: Provider) -> Row:
    return Row(
        case=case.name, op=case.op, family=case.family, model=case.model, shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."), provider=provider.name, note=provider.note,
        bytes=case.bytes, flops=case.flops,
    )  # fmt: skip


def _load(entry: _Entry, case: Case, meter: Meter) -> None:
    if entry.provider.needs_gpu and meter.device.type != "cuda":
        entry.row.status, entry.row.note = "missing", "needs a GPU"
        return
    entry.run = entry.provider.load(case)


# --- check ---------------------------------------------------------------------------------------


def _check(case: Case, entries: list[_Entry], meter: Meter, tell: Tell) -> None:
    """Judge every provider; at fewer rows if eager code or the exact result does not fit."""
    tried = case
    for _ in range(6):
        try:
            tell("exact result")
            inputs = tried.make(meter.device, seed=1)
            exact = exact_results(tried, inputs)
            eager = eager_results(tried, inputs)
            typical = typical_loss_error(tried, inputs)
            break
        except torch.OutOfMemoryError:
            exact = eager = inputs = None
            _free(meter)
            tried = tried.smaller()
    else:
        for entry in entries:
            if entry.alive and entry.provider.name == "tigon":
                entry.row.status, entry.row.note = "out of memory", "the accuracy check does not fit: not timed"
            elif entry.alive:
                entry.row.add_note("accuracy not checked: out of memory")
        return
    untouched, right = inputs.fingerprints(), (eager, exact, typical)
    for entry in entries:
        if entry.alive and entry.provider.autograd:
            tell(f"checking {entry.provider.name}")
            check = lambda entry=entry, inputs=inputs: _verdict(entry, inputs, meter, *right)
            verdict = _attempt(entry, meter, check)
            if verdict is not None:
                _judge_row(entry.row, verdict, "" if tried is case else "x".join(map(str, tried.shape)))
            after = inputs.fingerprints()
            written = [name for name, fingerprint in untouched.items() if after[name] != fingerprint]
            if written:
                # All providers share the inputs: one that is not known to destroy them must not be called again.
                if entry.alive:
                    entry.row.status = "wrong" if entry.provider.name == "tigon" else "error"
                    entry.row.note = f"not timed: writes over its inputs: {', '.join(written)}"
                check = inputs = None
                inputs = tried.make(meter.device, seed=1)


def _verdict(entry: _Entry, inputs: Inputs, meter: Meter, *right: object) -> Verdict:
    results = entry.bound(inputs).results()
    meter.synchronize()  # so that a failing kernel fails here
    return judge(results, *right)


def _judge_row(row: Row, verdict: Verdict, checked_at: str) -> None:
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
    return x if math.isfinite(x) else None  # JSON has no NaN


# --- measure -------------------------------------------------------------------------------------


def _measure(case: Case, entries: list[_Entry], meter: Meter, rounds: int, tell: Tell) -> None:
    inputs = case.make(meter.device)
    for entry in entries:
        if entry.alive:
            tell(f"warming up {entry.provider.name}")
            _attempt(entry, meter, lambda entry=entry: _warm_up(entry, inputs, meter))
    for index in range(rounds):
        # Each round in an order of its own: a hot chip is slow, and no one always follows the same one.
        for entry in random.Random(index).sample(entries, len(entries)):
            if entry.alive:
                tell(f"round {index + 1}/{rounds}: {entry.provider.name}")
                _attempt(entry, meter, lambda entry=entry: _round(entry, inputs, meter))


def _warm_up(entry: _Entry, inputs: Inputs, meter: Meter) -> None:
    bound = entry.bound(inputs)
    entry.calls = meter.calls(meter.warm_up(bound))
    entry.samples.peak_bytes = meter.peak_bytes(bound)
    entry.samples.gradient_bytes = bound.gradient_bytes


def _round(entry: _Entry, inputs: Inputs, meter: Meter) -> None:
    # What is copied or prepared for it lives for this round only: one provider's temporaries at a time.
    meter.round(entry.bound(inputs), entry.calls, entry.samples)


def _finish(entry: _Entry, roofline: Roofline) -> None:
    row, samples = entry.row, entry.samples
    row.floor_ms = roofline.floor_ms(row.bytes, row.flops)
    if not entry.alive:
        return
    row.kernel_ms, row.kernel_source = Samples.median(samples.kernel), samples.kernel_source
    row.wall_ms, row.host_ms = Samples.median(samples.wall), Samples.median(samples.host)
    row.peak_mib = None if samples.peak_bytes is None else samples.peak_bytes / 2**20
    if row.flops and samples.peak_bytes is not None:
        row.peak_above_gradients_mib = (samples.peak_bytes - samples.gradient_bytes) / 2**20
    row.samples = {"kernel": samples.kernel, "wall": samples.wall, "host": samples.host}
    if row.time_ms:
        row.percent_of_roofline = 100 * row.floor_ms / row.time_ms


def _compare_with_products(rows: list[Row]) -> None:
    products = next((row for row in rows if row.provider == "products" and row.time_ms), None)
    for row in rows:
        if products and row.time_ms and (row.kernel_ms is None) == (products.kernel_ms is None):
            row.products_ratio = row.time_ms / products.time_ms


# --- what can go wrong ---------------------------------------------------------------------------


def _attempt(entry: _Entry, meter: Meter, action: Callable[[], object]) -> object | None:
    """Run `action`; what it raises becomes the status of the row."""
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
    # Outside the handlers: the exception's frames, which hold tensors, are gone.
    entry.row.status, entry.row.note = status, note
    entry.run = None
    _free(meter)
    return None


def _attempt_all(step: Callable[[], None]) -> str:
    """Run what all providers of a case need; -> "" or what stopped it."""
    try:
        step()
    except Exception as problem:
        return _describe(problem)
    return ""


def _describe(problem: Exception) -> str:
    first_line = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first_line}"[:200]


def _free(meter: Meter) -> None:
    gc.collect()
    if meter.device.type == "cuda":
        # After an illegal access every call fails, this one too: the rows that follow say so.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
