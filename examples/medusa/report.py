"""The report: medusa.md, and a picture for each stage and number of heads."""

from pathlib import Path
from typing import Any

from tigon.tools.training import figures

GIB = 2**30


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
    lines = [
        "# Medusa", "", f"{describe(report)}.", "",
        "The state is the parameters, gradients and optimizer states. Every peak contains it, so there are ratios with "
        "and without it.", "",
        "| stage | heads | variant | against | at length | tokens/s | peak | peak above state | longest | "
        "difference of the losses at the first length |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in compare_variants(report):
        lines.append(
            f"| {row['stage']} | {row['heads']} | {row['variant']} | {row['base']} | {row['length']:,} "
            f"| {row['speed']:.2f}x | {row['peak']:.2f}x | {row['above_state']:.2f}x | {row['longest']:.1f}x "
            f"| {row['loss_difference']:.1e} |"
        )
    lines += ["", "| stage | heads | variant | length | tokens/s | steps | peak GiB | state GiB | loss |",
              "|---|---|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for run in report["runs"]:
        for result in sorted(run["results"], key=lambda r: r["length"]):
            start = f"| {run['stage']} | {run['heads']} | {run['variant']} | {result['length']:,} |"
            if "reason" in result:
                reason = "out of memory" if result["out_of_memory"] else result["reason"].replace("\n", " ")
                lines.append(f"{start} {reason} | | | | |")
                continue
            lines.append(
                f"{start} {result['tokens_per_second']:,.0f} | {len(result['seconds'])} "
                f"| {result['peak_bytes'] / GIB:.2f} | {result['state_bytes'] / GIB:.2f} | {result['loss']:.4f} |"
            )
    for stage, heads in sorted({(run["stage"], run["heads"]) for run in report["runs"]}):
        name = f"medusa_stage{stage}_heads{heads}.png"
        if plot(report, stage, heads, folder / name):
            lines += ["", f"![Stage {stage}, {heads} heads]({name})"]
    (folder / "medusa.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pick_colour(variant: str) -> str:
    name, _, level = variant.partition(":")
    return figures.LEVELS[level or "default"] if name == "tigon" else figures.STOCK


def plot(report: dict[str, Any], stage: int, heads: int, path: Path) -> bool:
    """Draw memory and speed over the length; return False if there is nothing to draw."""
    runs = [run for run in report["runs"] if (run["stage"], run["heads"]) == (stage, heads) and measured_results(run)]
    if not runs:
        return False
    memory_bytes = next((run["memory_bytes"] for run in runs if run.get("memory_bytes")), None)
    limit = memory_bytes / GIB if memory_bytes else None
    figure = figures.new_figure(10.0, 4.2)
    figures.headline(figure, f"Medusa, stage {stage}, {heads} heads", describe(report))
    memory_axes, speed_axes = figure.subplots(1, 2)
    if limit:
        figures.mark_limit(memory_axes, limit, "memory of the GPU")
    figures.draw_sweep(memory_axes, sweep_lines(runs, "peak_bytes", GIB), limit, "tokens a sequence")
    figures.clean(memory_axes, "Peak memory of a GPU, GiB" if limit else "Peak memory, GiB")
    figures.draw_sweep(speed_axes, sweep_lines(runs, "tokens_per_second", 1), None, "tokens a sequence")
    figures.clean(speed_axes, "Tokens per second")
    figures.add_side_legend(speed_axes)
    figure.savefig(path)
    return True


def sweep_lines(runs: list[dict[str, Any]], name: str, unit: float) -> list[figures.SweepLine]:
    """Return a line of the values `name` for each run, with the smallest length that did not fit."""
    lines = []
    for run in runs:
        results = measured_results(run)
        points = [(length, result[name] / unit) for length, result in results.items()]
        too_long = [r["length"] for r in run["results"] if r.get("out_of_memory") and r["length"] > max(results)]
        lines.append(
            figures.SweepLine(run["variant"], pick_colour(run["variant"]), points, min(too_long, default=None))
        )
    return lines
