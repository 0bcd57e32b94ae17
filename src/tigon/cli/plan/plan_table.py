"""Print a plan as a table, return it as JSON, or plot the memory of a step against the length of its sequences."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tigon
from tigon.cli.plan.planner import GIB, STOCK, LevelPlan, PlanSettings, recommend, seconds
from tigon.cli.plan.step import Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def assumptions(settings: PlanSettings) -> list[str]:
    """Return the assumptions behind the numbers, as sentences."""
    rates = settings.rates
    products = rates.products_fp32 if settings.dtype == "fp32" else rates.products
    sentences = [
        "Memory: bytes of tensors at the peak of a step that is not the first one. No token is padding. Attention runs "
        "a fused kernel if the model calls that of torch. "
        f"{settings.reserved_gib:.1f} of {settings.gpu_memory:.1f} GiB are reserved for CUDA, NCCL and gaps in the "
        "allocator's memory.",
        f"Speed: matrix products at {products / 1e12:.0f} TFLOP/s, attention at {rates.attention / 1e12:.0f} TFLOP/s, "
        f"all other operations at {rates.traffic / 1e12:.1f} TB/s, and {rates.host / 1e9:.0f} GB/s to the host, as in "
        "long steps on an H200. Small models wait for the host instead.",
    ]
    if settings.gpus > 1:
        sentences.append(f"GPUs exchange {rates.link / 1e9:.0f} GB/s in each direction while they compute.")
    if settings.engine == "fsdp":
        sentences += ["FSDP2 has the units of accelerate: each layer, the embedding, and the last norm with the head."]
    return sentences


def describe_adapters(settings: PlanSettings) -> list[str]:
    """Return a sentence about the adapters that are trained; none if all parameters are."""
    if settings.lora is None:
        return []
    base = " The weights below them take 4 bits (nf4 with double quantisation)." if settings.qlora else ""
    return [
        f"Only adapters (LoRA) of rank {settings.lora} are trained. All linear layers but the head have one, in fp32. "
        f"The other parameters are frozen: they have no gradients and no optimizer state.{base}"
    ]


# A column of the table: its heading, and a function that returns the cell of a level, and of a step at that level.
_Column = tuple[str, Callable[[LevelPlan, Step], str]]


def _columns(settings: PlanSettings) -> tuple[list[_Column], list[_Column]]:
    """Return the columns about the batch of the settings, and those about the largest batch of each level."""
    at_batch: list[_Column] = [
        (f"GiB at\nbatch {settings.batch}", lambda row, step: f"{step.peak / GIB:.1f}"),
        ("GiB for\nbackward", lambda row, step: f"{step.saved_bytes / GIB:.1f}"),
        ("fits", lambda row, step: "yes" if row.fits(settings) else "[red]no[/]"),
        ("speed", lambda row, step: f"{row.speed:.2f}"),
    ]
    at_largest: list[_Column] = [
        ("largest\nbatch", lambda row, step: f"{step.batch:,}"),
        ("GiB", lambda row, step: f"{step.peak / GIB:.1f}"),
        ("tokens\na step", lambda row, step: f"{step.batch * step.seq * settings.gpus:,}"),
        ("speed", lambda row, step: f"{row.largest_speed:.2f}"),
    ]
    return at_batch, at_largest


def _table(rows: list[LevelPlan], columns: list[_Column], best: LevelPlan | None, of_largest: bool) -> "Table":
    """Return a table with a row for each level at the batch of the settings or at the largest one."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    # In a terminal that is narrower than the table, the name of a level stays whole: a user copies it into `memory=`.
    table.add_column("memory=", no_wrap=True, min_width=max(len(row.level) for row in rows))
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row.level != STOCK):
        level = f"[bold]{row.level}[/]" if row is best else row.level
        step = row.largest if of_largest else row.step
        if step is not None:
            table.add_row(level, *(cell(row, step) for _, cell in columns))
        else:
            table.add_row(level, "-" if row.step is None else "[red]none[/]", style="dim" if row.step is None else "")
    return table


def print_plan(
    console: "Console", name: str, rows: list[LevelPlan], settings: PlanSettings, has_batch: bool, notes: list[str]
) -> None:
    """Print both tables, the recommended level and the assumptions."""
    from rich.markup import escape

    engine = f"{settings.gpus} GPUs by {settings.engine}" if settings.gpus > 1 else f"1 GPU, {settings.engine}"
    title = f"[bold]{escape(name)}[/], {settings.seq:,} tokens a sequence, {engine}, {settings.dtype}"
    if settings.lora is not None:
        title += f", {'QLoRA' if settings.qlora else 'LoRA'} of rank {settings.lora}"
    console.print(f"{title}, {settings.optimizer}, {settings.gpu_memory:.1f} GiB per GPU\n")
    best = recommend(rows, settings, has_batch)
    for of_largest, columns in enumerate(_columns(settings)):
        console.print(_table(rows, columns, best, bool(of_largest)))
        console.print()
    for note in (*notes, *(f"{row.level}: {row.reason}" for row in rows if row.reason)):
        console.print(escape(note), style="yellow")
    for sentence in _describe_host(rows, settings):
        console.print(sentence)
    console.print(_advice(best, settings, has_batch))
    console.print(
        "Batches are per GPU. Speed is in tokens per second, relative to the default level at the given batch."
    )
    for sentence in assumptions(settings):
        console.print(sentence, style="dim")


def _describe_host(rows: list[LevelPlan], settings: PlanSettings) -> list[str]:
    """Return sentences about the pinned memory of each level that needs some."""
    sentences = []
    for row in rows:
        if row.step is None or not row.step.host:
            continue
        need = f"{row.level}: {row.step.host / GIB:.0f} GiB of pinned memory per GPU at batch {settings.batch}"
        if row.step.host > settings.host_budget:
            need += f", but the host has {settings.host_memory:.0f} GiB for each GPU (--host-memory)"
        sentences.append(need + ".")
    return sentences


def _advice(best: LevelPlan | None, settings: PlanSettings, has_batch: bool) -> str:
    """Return the sentence about the recommended level, or about what to try if no level fits."""
    if best is None:
        subject = f"batch {settings.batch}" if has_batch else "even one sequence"
        return f"[bold red]No level fits {subject}[/]: use more GPUs with fsdp, a shorter sequence or a smaller batch."
    batch = settings.batch if has_batch or best.largest is None else best.largest.batch
    choice = f"[bold green]Use tigon.patch(model, memory={best.level!r})[/] with batch {batch} per GPU"
    return f"{choice}: this is the fastest level that fits."


def _step_json(step: Step | None, settings: PlanSettings) -> dict[str, Any] | None:
    if step is None:
        return None
    stages = ("forward", "backward", "update")
    return {
        "batch": step.batch,
        "peak_bytes": step.peak,
        "fixed_bytes": step.fixed,
        "kept_bytes": step.saved_bytes,
        "host_bytes": step.host,
        "fits": settings.load(step) <= 1.0,
        "seconds": seconds(step, settings),
        "tokens_a_second": step.batch * step.seq * settings.gpus / seconds(step, settings),
        "peaks": dict(zip(stages, step.peaks, strict=True)),
        "work": {stage: dataclasses.asdict(work) for stage, work in zip(stages, step.work, strict=True)},
    }


def as_json(
    name: str, rows: list[LevelPlan], settings: PlanSettings, has_batch: bool, notes: list[str]
) -> dict[str, Any]:
    """Return the whole plan as values that `json` can write."""
    import torch
    import transformers

    best = recommend(rows, settings, has_batch)
    return {
        "model": name,
        "settings": {**dataclasses.asdict(settings), "strategy": settings.engine, "budget_bytes": settings.budget},
        "recommended": best and best.level,
        "levels": {
            row.level: {
                "at_batch": _step_json(row.step, settings),
                "largest": _step_json(row.largest, settings),
                "relative_speed": row.speed,
                "relative_speed_of_largest": row.largest_speed,
                "reason": row.reason,
            }
            for row in rows
        },
        "notes": notes,
        "assumptions": assumptions(settings),
        "versions": {"tigon": tigon.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


SHORTEST_SEQUENCE = 128
STOCK_COLOUR, LIMIT_COLOUR = "#8c8c8c", "#c0392b"


def lengths(seq: int) -> tuple[int, ...]:
    """Return lengths up to four times `seq`, each twice the one before."""
    return tuple(seq * 2**k // 8 for k in range(6) if seq * 2**k // 8 >= SHORTEST_SEQUENCE) or (seq,)


def draw(path: Path, name: str, plans: list[LevelPlan], settings: PlanSettings) -> None:
    """Plot the steps `by_length` of all levels to a file, whose suffix names its format. This needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    level_plans = sorted((row for row in plans if row.by_length), key=lambda row: row.level != STOCK)
    ticks = [step.seq for step in level_plans[0].by_length]
    figure = Figure(figsize=(7, 4.8), dpi=160, layout="constrained")
    # This canvas draws to a file and needs no display.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, plan in enumerate(level_plans):
        colour = STOCK_COLOUR if plan.level == STOCK else f"C{index}"
        peaks = [step.peak / GIB for step in plan.by_length]
        axes.plot(ticks, peaks, marker="osD^vP*Xp"[index % 9], markersize=4, label=plan.level, color=colour)
    axes.axhline(settings.budget / GIB, color=LIMIT_COLOUR, linewidth=1, linestyle="--", label="memory for tensors")
    axes.set_xlabel("tokens a sequence")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{seq:,}" for seq in ticks])
    axes.set_ylim(0, 1.5 * settings.budget / GIB)
    devices = f"each of {settings.gpus} GPUs" if settings.gpus > 1 else "one GPU"
    axes.set_title(f"Peak memory of a GPU, GiB: {name}, batch {settings.batch} on {devices}", fontsize=10)
    axes.grid(color="#d9dce1", linewidth=0.7)
    # Lines of long sequences leave the axes at the top, so the legend stands below them.
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
