"""What the two runs measured: comparison, tolerance, table, report.json."""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tigon.tools.demo.presets import Preset, warmup_steps
from tigon.tools.environment import device_name, environment
from tigon.tools.training.job import Job
from tigon.tools.training.records import without_nan
from tigon.tools.training.text import Corpus, Tokens

__all__ = [
    "TOLERANCE",
    "Comparison",
    "Run",
    "Tolerance",
    "compare",
    "memory_sentence",
    "print_table",
    "write_json",
]


@dataclass(frozen=True)
class Tolerance:
    """How far the losses of one step may be apart, relative to the loss: `first` at the first step, and from there
    tenfold every 30 steps, because training amplifies rounding; at most 3 %.
    """

    first: float
    reason: str

    def at(self, step: int) -> float:
        """For the step of that index.

        >>> [round(Tolerance(1e-5, "").at(step), 6) for step in (0, 30, 60, 600)]
        [1e-05, 0.0001, 0.001, 0.03]
        """
        return min(0.03, self.first * 10 ** (step / 30))


# Measured with the CPU preset, `--noise` being stock against stock with the sequences of each batch in reverse order.
# Faults for comparison, in fp32: the gradient of 1 token of 2048 lost shows as 5e-5 at step 4, the gradients of the
# norms' weights lost as 8e-5 at step 5 and 2e-3 at step 14.
TOLERANCE = {
    "float32": Tolerance(
        1e-5,
        "Sums are taken in another order, and training amplifies what that rounds differently: stock against itself "
        "(--noise) came apart by 2e-07 in 30 steps, by 1e-03 in 150.",
    ),
    # Measured on an H200 with the CUDA preset: stock against itself 9e-4 (llama, 30 steps) and 7e-4 (phi3, 12 steps);
    # patched against stock, which rounds in more places, up to 1.7e-3 (seven model types, 12 to 30 steps) in bf16, and
    # 1.7e-6 in fp32 (phi3, 8 steps). Training in bf16 and in fp32, both stock, are 1e-2 apart from step 6 on (phi3).
    "bfloat16": Tolerance(
        2e-3,
        "bf16 rounds to three digits, stock in more places than Tigon: stock in bf16 is itself up to 1e-02 away from "
        "stock in fp32 within 8 steps. For a sharper comparison: --dtype float32.",
    ),
}


@dataclass
class Run:
    """One training run: its job, and what came out of it step by step."""

    name: str  # in files
    title: str  # for people
    model_type: str
    preset: Preset
    job: Job
    facts: dict[str, Any] = field(default_factory=dict)  # what the process said of its model
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def steps(self) -> int:
        return self.preset.steps

    @property
    def tokens_per_step(self) -> int:
        return self.preset.tokens

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the warm-up; NaN before the first."""
        measured = self.seconds[warmup_steps(len(self.seconds)) :]
        return statistics.median(measured) if measured else math.nan

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds


@dataclass(frozen=True)
class Comparison:
    """Two runs against each other, over the steps that both have done.

    `differences` are |a - b| / max(|a|, 1) of the losses of each step, infinite where one of them is not finite;
    `largest` and `worst` are the indices of the largest one and of the one that is largest for its tolerance.
    """

    differences: list[float]
    tolerances: list[float]
    step_time_ratio: float
    peak_memory_ratio: float

    @property
    def largest(self) -> int:
        return max(range(len(self.differences)), key=self.differences.__getitem__)

    @property
    def worst(self) -> int:
        return max(range(len(self.differences)), key=lambda step: self.differences[step] / self.tolerances[step])

    @property
    def loss_difference(self) -> float:
        return self.differences[self.largest]

    @property
    def agree(self) -> bool:
        return self.differences[self.worst] <= self.tolerances[self.worst]


def _difference(a: float, b: float) -> float:
    # A loss is a difference of logits and rounds as they do: one near zero has few right digits, or none.
    return abs(a - b) / max(abs(a), 1.0) if math.isfinite(a) and math.isfinite(b) else math.inf


def compare(first: Run, second: Run) -> Comparison | None:
    """`second` against `first`; None if there is no step that both have done."""
    pairs = list(zip(first.losses, second.losses, strict=False))
    if not pairs:
        return None
    tolerance = TOLERANCE[first.preset.dtype]
    return Comparison(
        differences=[_difference(a, b) for a, b in pairs],
        tolerances=[tolerance.at(step) for step in range(len(pairs))],
        step_time_ratio=second.step_seconds / first.step_seconds,
        peak_memory_ratio=second.peak_bytes / first.peak_bytes if first.peak_bytes else math.nan,
    )


# --- for people ----------------------------------------------------------------------------------


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def memory_sentence(job: Job) -> str:
    """What the memory row counts."""
    if job.device == "cpu":
        peak = "Peak memory is the peak of the process's resident memory"
    else:
        peak = "Peak memory is the peak of torch's CUDA allocator"
    return f"{peak} in training, above parameters, gradients and optimizer states."


def print_table(console: Console, first: Run, second: Run, comparison: Comparison | None) -> None:
    """The two runs side by side, with the ratio `second` / `first`; dashes where nothing was measured."""
    table = Table(title=f"{first.model_type}, {device_name(first.job.device)}", title_style="bold")
    for heading, justify in (("", "left"), (first.title, "right"), (second.title, "right"), ("ratio", "right")):
        table.add_column(heading, justify=justify)

    def row(name: str, values: Sequence[tuple[float, str]]) -> None:
        (a, a_text), (b, b_text) = values
        ratio = b / a if a else math.nan
        cells = ((a, a_text), (b, b_text), (ratio, f"{ratio:.2f}x"))
        table.add_row(name, *(text if value == value else "-" for value, text in cells))

    runs = (first, second)
    nan = math.nan
    row("step time (median)", [(run.step_seconds, f"{run.step_seconds * 1e3:,.0f} ms") for run in runs])
    row("tokens/s", [(run.tokens_per_second, f"{run.tokens_per_second:,.0f}") for run in runs])
    row("peak memory above model", [(run.peak_bytes or nan, _mib(run.peak_bytes)) for run in runs])
    row("last loss", [(run.losses[-1], f"{run.losses[-1]:.4f}") if run.losses else (nan, "") for run in runs])
    if comparison is not None:
        table.add_section()
        table.add_row("largest loss difference", "", "", f"{comparison.loss_difference:.1e}")
        table.add_row("  tolerance there", "", "", f"{comparison.tolerances[comparison.largest]:.1e}")
    console.print(table)


# --- for programs --------------------------------------------------------------------------------


def _run_facts(run: Run) -> dict[str, Any]:
    return {
        "title": run.title,
        "losses": run.losses,
        "step_seconds": run.seconds,
        "median_step_seconds": run.step_seconds,
        "tokens_per_second": run.tokens_per_second,
        "peak_bytes_above_state": run.peak_bytes,
        **run.facts,
    }


def write_json(
    path: Path,
    runs: Sequence[Run],
    comparison: Comparison | None,
    *,
    corpus: Corpus,
    tokens: Tokens,
    interrupted: bool,
    failures: dict[str, str],
) -> None:
    """All numbers, and what they were measured on and with. Losses and seconds are listed step by step."""
    job = runs[0].job
    facts = {
        "format": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "interrupted": interrupted,
        "failures": failures,
        "environment": environment(),
        "device": {"torch": job.device, "name": device_name(job.device)},
        "model_type": runs[0].model_type,
        "seed": job.seed,
        "preset": asdict(runs[0].preset),
        "warmup_steps": warmup_steps(max(len(run.seconds) for run in runs)),
        "text": {
            "source": corpus.name,
            "documents": len(corpus.documents),
            "characters": corpus.characters,
            "truncated": corpus.truncated,
            "tokens": tokens.count,
            "bpe_entries": tokens.entries,
        },
        "runs": {run.name: _run_facts(run) for run in runs},
        "comparison": comparison
        and {
            **asdict(comparison),
            "loss_difference": comparison.loss_difference,
            "largest_at_step": comparison.largest,
            "agree": comparison.agree,
        },
        "tolerance_reason": TOLERANCE[job.dtype].reason,
    }
    path.write_text(json.dumps(without_nan(facts), indent=2) + "\n", encoding="utf-8")
