"""The report of the demo: the comparison of its two runs, the tolerance, a table, report.json and two pictures."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.demo.demo_presets import warmup_steps
from benchmarks.demo.demo_runs import DemoRun
from benchmarks.training.figures import INK, Bar, Curve, Panel, draw_losses, draw_panels, provider_colour
from benchmarks.training.job import Job
from benchmarks.training.measurement import loss_differences
from benchmarks.training.text import Corpus, Tokens
from tigon.cli.environment import device_name, environment
from tigon.cli.output import write_json

COLOURS = (provider_colour("stock"), provider_colour("tigon"))
# These facts of a run's model are in report.json.
FACTS = ("event", "parameters", "state_bytes", "attention", "threads")


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that the losses of a step may have, relative to the loss.

    It is `first` at the first step and grows tenfold every 30 steps, because training amplifies rounding. It is at
    most 3 %.
    """

    first: float
    reason: str

    def at(self, step: int) -> float:
        """Return the tolerance of the step with that index.

        >>> [round(Tolerance(1e-5, "").at(step), 6) for step in (0, 30, 60, 600)]
        [1e-05, 0.0001, 0.001, 0.03]
        """
        return min(0.03, self.first * 10 ** (step / 30))


# The fp32 tolerance was measured with the CPU preset. `--noise` compares stock with stock, with the sequences of each
# batch in reverse order. A fault shows as a larger difference in fp32: 5e-5 at step 4 if the gradient of 1 token of
# 2048 is lost, and 8e-5 at step 5 and 2e-3 at step 14 if the gradients of the norms' weights are lost.
TOLERANCE = {
    "float32": Tolerance(
        1e-5,
        "Tigon adds in another order than stock, and training amplifies the difference of the rounding: stock against "
        "itself (--noise) differed by 2e-07 within 30 steps, by 1e-03 within 150.",
    ),
    # The bf16 tolerance was measured on an H200 with the CUDA preset. Stock differs from itself by 9e-4 (llama, 30
    # steps) and 7e-4 (phi3, 12 steps). Patched differs from stock, which rounds in more places, by up to 1.7e-3 in bf16
    # (seven model types, 12 to 30 steps) and by 1.7e-6 in fp32 (phi3, 8 steps). Stock in bf16 differs from stock in
    # fp32 by 1e-2 from step 6 on (phi3).
    "bfloat16": Tolerance(
        2e-3,
        "bf16 rounds to three digits, stock in more places than Tigon: stock in bf16 differs from stock in fp32 by up "
        "to 1e-02 within 8 steps. --dtype float32 gives a sharper comparison.",
    ),
}


@dataclass(frozen=True)
class DemoComparison:
    """The second run against the first, over the steps that both have done.

    `differences` are |a - b| / max(|a|, 1) of the losses of each step, infinite where a loss is not finite. `largest`
    is the index of the largest difference, and `worst` the index of the difference that is largest relative to its
    tolerance.
    """

    differences: list[float]
    tolerances: list[float]
    step_time_ratio: float | None
    peak_memory_ratio: float | None

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


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None


def compare(first: DemoRun, second: DemoRun) -> DemoComparison | None:
    """Compare `second` with `first`; return None if there is no step that both have done."""
    differences = loss_differences(second.losses, first.losses, relative=True)
    if not differences:
        return None
    tolerance = TOLERANCE[first.preset.dtype]
    return DemoComparison(
        differences=differences,
        tolerances=[tolerance.at(step) for step in range(len(differences))],
        step_time_ratio=_ratio(first.measurement.step_seconds, second.measurement.step_seconds),
        peak_memory_ratio=_ratio(first.peak_bytes, second.peak_bytes),
    )


# --- the table -----------------------------------------------------------------------------------


def memory_sentence(job: Job) -> str:
    """Return a sentence that says what the memory row counts."""
    if job.device == "cpu":
        peak = "Peak memory is the peak of the process's resident memory"
    else:
        peak = "Peak memory is the peak of torch's CUDA allocator"
    return f"{peak} in training, above parameters, gradients and optimizer states."


def print_table(console: Console, first: DemoRun, second: DemoRun, comparison: DemoComparison | None) -> None:
    """Print the two runs side by side, with the ratio `second` / `first`; dashes where nothing was measured."""
    table = Table(title=f"{first.model_type}, {device_name(first.job.device)}", title_style="bold")
    table.add_column("", justify="left")
    for heading in (first.title, second.title, "ratio"):
        table.add_column(heading, justify="right")
    cell = lambda value, template: "-" if value is None or math.isnan(value) else template.format(value)
    runs = (first, second)
    for name, values, template in (
        ("step time (median)", [s and 1e3 * s for s in (run.measurement.step_seconds for run in runs)], "{:,.0f} ms"),
        ("tokens/s", [run.measurement.tokens_per_second for run in runs], "{:,.0f}"),
        ("peak memory above model", [run.peak_bytes / 2**20 or None for run in runs], "{:,.0f} MiB"),
        ("last loss", [run.losses[-1] if run.losses else None for run in runs], "{:.4f}"),
    ):
        table.add_row(name, *(cell(value, template) for value in values), cell(_ratio(*values), "{:.2f}x"))
    if comparison is not None:
        table.add_section()
        table.add_row("largest loss difference", "", "", f"{comparison.loss_difference:.1e}")
        table.add_row("  tolerance there", "", "", f"{comparison.tolerances[comparison.largest]:.1e}")
    console.print(table)


# --- files ---------------------------------------------------------------------------------------


def _run_facts(run: DemoRun) -> dict[str, Any]:
    measurement, facts = run.measurement, {name: run.facts[name] for name in FACTS if name in run.facts}
    if run.facts:
        facts["patch"] = run.facts.get("applied") or None
    return {
        "title": run.title, "losses": run.losses, "step_seconds": measurement.seconds,
        "median_step_seconds": measurement.step_seconds, "tokens_per_second": measurement.tokens_per_second,
        "peak_bytes_above_state": run.peak_bytes, **facts,
    }  # fmt: skip


def write_report(
    path: Path, runs: Sequence[DemoRun], comparison: DemoComparison | None, *, corpus: Corpus, tokens: Tokens,
    interrupted: bool,
) -> None:  # fmt: skip
    """Write all numbers, with the machine, versions and settings. Losses and seconds have an entry for each step."""
    first = runs[0]
    report = {
        "format": 1, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "interrupted": interrupted,
        "failures": {run.name: run.failure for run in runs if run.failure},
        "environment": environment(), "device": {"torch": first.job.device, "name": device_name(first.job.device)},
        "model_type": first.model_type, "seed": first.job.seed, "preset": asdict(first.preset),
        "warmup_steps": warmup_steps(max(len(run.measurement.seconds) for run in runs)),
        "text": {
            "source": corpus.name, "documents": len(corpus.documents), "characters": corpus.characters,
            "truncated": corpus.is_truncated, "tokens": tokens.count, "bpe_entries": tokens.entries,
        },
        "runs": {run.name: _run_facts(run) for run in runs},
        "comparison": comparison and {
            **asdict(comparison), "loss_difference": comparison.loss_difference,
            "largest_at_step": comparison.largest, "agree": comparison.agree,
        },
        "tolerance_reason": TOLERANCE[first.job.dtype].reason,
    }  # fmt: skip
    write_json(path, report, indent=2)


def plot_loss(path: Path, first: DemoRun, second: DemoRun, comparison: DemoComparison | None, subtitle: str) -> None:
    """Draw both curves over each other, and below them their relative difference with the tolerance."""
    title = f"Training loss: {first.title} and {second.title}"
    curves = [Curve(first.title, COLOURS[0], first.losses, broad=True), Curve(second.title, COLOURS[1], second.losses)]
    differences = [Curve("", INK, comparison.differences)] if comparison else []
    tolerances = comparison.tolerances if comparison else []
    draw_losses(path, title, subtitle, curves, differences, "relative\ndifference", tolerances, resolution=1e-8)


def plot_speed_memory(path: Path, first: DemoRun, second: DemoRun, subtitle: str) -> None:
    """Draw bars of tokens/s and of peak memory above the model, with the second run's ratio to the first."""

    def panel(title: str, values: Sequence[float | None], template: str) -> Panel:
        ratio = _ratio(*values)
        texts = ["not measured" if value is None else template.format(value) for value in values]
        ratios = ("", "" if ratio is None else f"{ratio:.2f}x")
        return Panel(title, [Bar(*bar) for bar in zip(titles, COLOURS, values, texts, ratios, strict=True)])

    titles = (first.title, second.title)
    speeds = (first.measurement.tokens_per_second, second.measurement.tokens_per_second)
    in_gib = max(first.peak_bytes, second.peak_bytes) >= 10_000 * 2**20
    unit, size, template = ("GiB", 2**30, "{:,.1f} GiB") if in_gib else ("MiB", 2**20, "{:,.0f} MiB")
    peaks = (first.peak_bytes / size or None, second.peak_bytes / size or None)
    panels = [
        panel("Tokens per second", speeds, "{:,.0f}"),
        panel(f"Peak memory above the model, {unit}", peaks, template),
    ]
    draw_panels(path, "Speed and memory", subtitle, panels, 7.2, 3.8)
