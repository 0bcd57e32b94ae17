"""The report: medusa.md, and a picture for each stage and number of heads."""

import sys
from pathlib import Path
from typing import Any

from tigon.cli.output import markdown_table

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import figures

GIB = 2**30
LEFT = ("stage", "heads", "variant", "against")


def measured_results(run: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the results of the lengths that fitted, by length."""
    results = sorted(run["results"], key=lambda result: result["length"])
    return {result["length"]: result for result in results if "reason" not in result}


def compare_variants(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each variant, at the longest common length, with the first one for which any length fitted."""
    rows = []
    for run in report["runs"]:
        group = [r for r in report["runs"] if (r["stage"], r["heads"]) == (run["stage"], run["heads"])]
        base = next((r for r in group if measured_results(r)), run)
        results, base_results = measured_results(run), measured_results(base)
        common = sorted(results.keys() & base_results.keys())
        if run is base or not common:
            continue
        a, b = results[common[-1]], base_results[common[-1]]
        above_state = [x["peak_bytes"] - x["state_bytes"] for x in (a, b)]
        rows.append({
            "stage": run["stage"], "heads": run["heads"], "variant": run["variant"], "base": base["variant"],
            "length": common[-1],
            "speed": a["tokens_per_second"] / b["tokens_per_second"],
            "peak": a["peak_bytes"] / b["peak_bytes"],
            "above_state": above_state[0] / above_state[1] if above_state[1] > 0 else float("nan"),
            "longest": max(results) / max(base_results),
            "loss_difference": abs(results[common[0]]["loss"] - base_results[common[0]]["loss"]),
        })  # fmt: skip
    return rows


def describe(report: dict[str, Any]) -> str:
    """Return a line about the devices and the model."""
    options = report["options"]
    devices = sorted({run["device"] for run in report["runs"] if run["device"]}) or [options["device"]]
    return (
        f"{options['gpus']} x {', '.join(devices)}; {options['layers']} layers, hidden {options['hidden']}, vocabulary "
        f"{options['vocabulary']}, batch {options['batch']}, {options['optimizer']}"
    )


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write medusa.md and the pictures."""
    titles = (*LEFT, "at length", "tokens/s", "peak", "peak above state", "longest")
    comparisons = [
        [
            str(row["stage"]), str(row["heads"]), row["variant"], row["base"], f"{row['length']:,}",
            *(f"{row[name]:.2f}x" for name in ("speed", "peak", "above_state")), f"{row['longest']:.1f}x",
            f"{row['loss_difference']:.1e}",
        ]
        for row in compare_variants(report)
    ]  # fmt: skip
    results = []
    for run in report["runs"]:
        for result in sorted(run["results"], key=lambda r: r["length"]):
            if "reason" in result:
                reason = "out of memory" if result["out_of_memory"] else result["reason"].replace("\n", " ")
                cells = [reason, "", "", "", ""]
            else:
                cells = [f"{result['tokens_per_second']:,.0f}", str(len(result["seconds"]))]
                cells += [f"{result[name] / GIB:.2f}" for name in ("peak_bytes", "state_bytes")]
                cells += [f"{result['loss']:.4f}"]
            results.append([str(run["stage"]), str(run["heads"]), run["variant"], f"{result['length']:,}", *cells])
    lines = [
        "# Medusa", "", f"{describe(report)}.", "",
        "The state is the parameters, gradients and optimizer states. Every peak contains it, so there are ratios with "
        "and without it.", "",
        *markdown_table((*titles, "difference of the losses at the first length"), comparisons, LEFT), "",
        *markdown_table(
            (*LEFT[:3], "length", "tokens/s", "steps", "peak GiB", "state GiB", "loss"), results, LEFT
        ),
    ]  # fmt: skip
    for stage, heads in sorted({(run["stage"], run["heads"]) for run in report["runs"]}):
        name = f"medusa_stage{stage}_heads{heads}.png"
        if plot(report, stage, heads, folder / name):
            lines += ["", f"![Stage {stage}, {heads} heads]({name})"]
    (folder / "medusa.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def plot(report: dict[str, Any], stage: int, heads: int, path: Path) -> bool:
    """Draw memory and speed over the length; return False if there is nothing to draw."""
    runs = [run for run in report["runs"] if (run["stage"], run["heads"]) == (stage, heads) and measured_results(run)]
    if not runs:
        return False
    memory_bytes = next((run["memory_bytes"] for run in runs if run.get("memory_bytes")), None)
    limit = memory_bytes / GIB if memory_bytes else None

    def panel(title: str, name: str, unit: int, limit: float | None = None) -> figures.Panel:
        values = (
            (run["variant"], result["length"], result[name] / unit if name in result else None)
            for run in runs
            for result in run["results"]
            if name in result or result["out_of_memory"]
        )
        return figures.Panel(title, (), figures.sweep_lines(values), limit, "tokens a sequence")

    memory = panel("Peak memory of a GPU, GiB" if limit else "Peak memory, GiB", "peak_bytes", GIB, limit)
    panels = [memory, panel("Tokens per second", "tokens_per_second", 1)]
    figures.draw_panels(path, f"Medusa, stage {stage}, {heads} heads", describe(report), panels, 10.0, 4.2)
    return True
