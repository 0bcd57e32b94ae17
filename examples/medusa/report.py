"""medusa.md and a picture for each stage and number of heads."""

from pathlib import Path

from tigon.tools.training import figures

GIB = 2**30


def measured(run: dict) -> dict[int, dict]:
    """What a run could do, by length."""
    return {result["length"]: result for result in sorted(run["results"], key=lambda r: r["length"]) if
            "reason" not in result}  # fmt: skip


def comparisons(report: dict) -> list[dict]:
    """Each variant against the first one that could do a length, of its stage and number of heads, at their longest
    common length."""
    rows = []
    for run in report["runs"]:
        group = [r for r in report["runs"] if (r["stage"], r["heads"]) == (run["stage"], run["heads"])]
        base = next((r for r in group if measured(r)), run)
        mine, theirs = measured(run), measured(base)
        common = sorted(mine.keys() & theirs.keys())
        if run is base or not common:
            continue
        a, b = mine[common[-1]], theirs[common[-1]]
        above = [x["peak_bytes"] - x["state_bytes"] for x in (a, b)]
        rows.append({
            "stage": run["stage"], "heads": run["heads"], "variant": run["variant"], "base": base["variant"],
            "length": common[-1],
            "speed": a["tokens_per_second"] / b["tokens_per_second"],
            "peak": a["peak_bytes"] / b["peak_bytes"],
            "above_state": above[0] / above[1] if above[1] > 0 else float("nan"),
            "longest": max(mine) / max(theirs),
            "loss_difference": abs(mine[common[0]]["loss"] - theirs[common[0]]["loss"]),
        })  # fmt: skip
    return rows


def described(report: dict) -> str:
    options = report["options"]
    devices = sorted({run["device"] for run in report["runs"] if run["device"]}) or [options["device"]]
    return (
        f"{options['gpus']} x {', '.join(devices)}; {options['layers']} layers, hidden {options['hidden']}, vocabulary "
        f"{options['vocabulary']}, batch {options['batch']}, {options['optimizer']}"
    )


def write(report: dict, folder: Path) -> None:
    lines = [
        "# Medusa", "", f"{described(report)}.", "",
        "State: parameters, gradients, optimizer. The peak holds it whatever the code, so ratios are given with and "
        "without it.", "",
        "| stage | heads | variant | against | at length | tokens/s | peak | peak above state | longest | loss, "
        "first length: difference |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in comparisons(report):
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
                why = "out of memory" if result["out_of_memory"] else result["reason"].replace("\n", " ")
                lines.append(f"{start} {why} | | | | |")
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


def colour(variant: str) -> str:
    name, _, level = variant.partition(":")
    return figures.LEVELS[level or "default"] if name == "tigon" else figures.STOCK


def plot(report: dict, stage: int, heads: int, path: Path) -> bool:
    """Memory and speed against length, with a cross at the GPU's memory where it ended; -> whether any was drawn."""
    runs = [run for run in report["runs"] if (run["stage"], run["heads"]) == (stage, heads) and measured(run)]
    if not runs:
        return False
    limit = next((run["memory_bytes"] for run in runs if run.get("memory_bytes")), None)
    panels = (
        ("Peak memory of a GPU, GiB" if limit else "Peak memory, GiB", lambda r: r["peak_bytes"] / GIB),
        ("Tokens per second", lambda r: r["tokens_per_second"]),
    )
    figure = figures.new_figure(10.0, 4.2)
    figures.headline(figure, f"Medusa, stage {stage}, {heads} heads", described(report))
    lengths = set()
    for axes, (what, value) in zip(figure.subplots(1, 2), panels, strict=True):
        memory = what.startswith("Peak")
        lines = []
        for run in runs:
            points = [(length, value(result)) for length, result in measured(run).items()]
            longest = points[-1][0]
            ends = [r["length"] for r in run["results"] if r.get("out_of_memory") and r["length"] > longest]
            lengths |= {*measured(run), *ends}
            end = min(ends) if ends and memory else None
            lines.append(figures.SweepLine(run["variant"], colour(run["variant"]), points, end))
        figures.draw_sweep(axes, lines, limit / GIB if memory and limit else None)
        if memory and limit:
            figures.mark_limit(axes, limit / GIB, "memory of the GPU")
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlabel("tokens a sequence" + "   (x: out of memory)" * memory, color=figures.MUTED)
        axes.yaxis.set_major_formatter("{x:,g}")
        figures.clean(axes, what)
    for axes in figure.axes:
        doublings = [x for x in sorted(lengths) if x % min(lengths) == 0 and (x // min(lengths)).bit_count() == 1]
        axes.set_xlim(min(lengths) / 1.1, max(lengths) * 1.1)
        axes.set_xticks(doublings, [f"{x:,}" for x in doublings])
        axes.minorticks_off()
    style = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 9}
    figure.axes[-1].legend(frameon=False, labelcolor=figures.INK, **style)
    figure.savefig(path)
    return True
