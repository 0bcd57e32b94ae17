"""The measurements of a run at one size of a step, and the comparison of its losses with another run's."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.train.providers import STOCK_FP32

# The factor is three, because the noise of a single run is random, and because a patched model rounds differently in
# every layer, whereas reversed sequences do not change the forward pass of a sequence. The slack is for losses that
# agree to their last digits.
NOISE_FACTOR, SLACK = 3.0, 1e-4

# The name of the runs of stock whose batches are reversed.
STOCK_REVERSED = "stock-reversed"
# Runs that serve as a reference for the losses of others, and are no competitors.
REFERENCES = (STOCK_REVERSED, STOCK_FP32)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass
class Measurement:
    """The steps of one provider at one size. `status` is "ok", "out of memory", "missing" (not installed, no GPU),
    "unsupported" (the provider refuses the model) or "error"; `note` gives details. `seconds` and `host_seconds` have
    an entry for each timed step, `losses` for each step. `allocated` and `reserved` are peaks in bytes, of the rank
    that has the highest. `state_bytes` are those of a rank's parameters and optimizer states. `gpu_seconds` and
    `kernels` are the time and the number of the kernels, copies and fills of a step on a GPU. `first_seconds` and
    `again_seconds` are those of steps at uneven lengths, each for the first time and again, without the seconds of
    `captures` of CUDA graphs. `trained_tokens` are those of all timed steps where texts are padded."""

    provider: str
    batch: int
    seq: int
    gpus: int = 1
    status: str = "ok"
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    allocated: int | None = None
    reserved: int | None = None
    state_bytes: int = 0
    gpu_seconds: float | None = None
    kernels: int | None = None
    first_seconds: list[float] = field(default_factory=list)
    again_seconds: list[float] = field(default_factory=list)
    captures: list[dict[str, Any]] = field(default_factory=list)
    trained_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.seconds)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq * self.gpus

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def median_host_seconds(self) -> float | None:
        return statistics.median(self.host_seconds) if self.host_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        if self.trained_tokens:
            return self.trained_tokens / sum(self.seconds)
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def spread(self) -> tuple[float, float] | None:
        if len(self.seconds) < 2:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def above_state(self) -> int | None:
        return None if self.allocated is None else self.allocated - self.state_bytes

    @property
    def failed(self) -> bool:
        """Return True if the command must end with exit code 1."""
        return self.status == "error" and self.provider.startswith("tigon")

    def add(self, result: dict[str, Any]) -> None:
        """Add the result of a process. Peaks are the highest of all rounds. Losses, kernels and graphs are those of the
        first round, because a later round trains the same steps again."""
        for name in ("seconds", "host_seconds", "first_seconds", "again_seconds", "trained_tokens"):
            # Training by TRL has no uneven lengths, and other training no count of the tokens.
            if name in result:
                setattr(self, name, getattr(self, name) + result[name])
        for name in ("losses", "gpu_seconds", "kernels", "captures", "state_bytes"):
            setattr(self, name, getattr(self, name) or result.get(name))
        for name in ("allocated", "reserved"):
            values = [value for value in (getattr(self, name), result[name]) if value is not None]
            setattr(self, name, max(values, default=None))

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        samples = {name: fields.pop(name) for name in ("seconds", "host_seconds", "first_seconds", "again_seconds")}
        medians = {
            "tokens_per_step": self.tokens, "step_seconds": self.step_seconds, "quartiles": self.spread,
            "median_host_seconds": self.median_host_seconds, "tokens_per_second": self.tokens_per_second,
            "mean_first_seconds": _mean(self.first_seconds), "mean_again_seconds": _mean(self.again_seconds),
        }  # fmt: skip
        return {**fields, **medians, "samples": samples}


def loss_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return |loss - reference| for each step that both have; infinite where one of the two is not finite."""
    return [
        abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
        for a, b in zip(losses, reference, strict=False)
    ]


@dataclass(frozen=True)
class LossComparison:
    """The largest and the root-mean-square difference of a run's losses from stock's. `noise` and `noise_rms` are the
    same differences of stock with the sequences of each batch reversed; without that run there is no verdict. `error`
    and `stock_error` are the root-mean-square differences of the run and of stock from the losses of the same model in
    fp32. None stands for a run that is missing."""

    steps: int
    largest: float
    rms: float
    first_loss: float
    last_loss: float
    noise: float | None = None
    noise_rms: float | None = None
    error: float | None = None
    stock_error: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Return whether the run is as near to stock as the noise allows, or as near to fp32 as stock is."""
        if self.noise_rms is None:
            return None
        if self.rms <= NOISE_FACTOR * self.noise_rms + SLACK:
            return True
        if self.error is None or self.stock_error is None or not math.isfinite(self.error + self.stock_error):
            return False
        return self.error <= self.stock_error + SLACK


def compare_with_stock(measurements: Iterable[Measurement]) -> dict[str, LossComparison]:
    """Compare every run that has losses with stock at the first size of both; {} without stock."""
    first = {run.provider: run for run in reversed(list(measurements)) if run.losses}
    stock = first.pop("stock", None)
    if stock is None:
        return {}
    runs = {name: run for name, run in first.items() if (run.batch, run.seq) == (stock.batch, stock.seq)}

    def compare(run: Measurement | None, other: Measurement | None) -> tuple[Any, Any]:
        """Return the largest and the root-mean-square difference of the losses of two runs."""
        if run is None or other is None:
            return None, None
        differences = loss_differences(run.losses, other.losses)
        return max(differences), math.sqrt(statistics.fmean(value * value for value in differences))

    noise, exact_run = compare(runs.get(STOCK_REVERSED), stock), runs.get(STOCK_FP32)
    return {
        name: LossComparison(
            min(len(run.losses), len(stock.losses)), *compare(run, stock), run.losses[0], run.losses[-1], *noise,
            compare(run, exact_run)[1], compare(stock, exact_run)[1],
        )
        for name, run in reversed(runs.items())
    }  # fmt: skip
