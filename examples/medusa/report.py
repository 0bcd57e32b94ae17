"""medusa.md and a picture for each stage and number of heads."""

from pathlib import Path

GIB = 2**30


def measured(run: dict) -> dict[int, dict]:
    """What a run could do, by length."""
    return {result["length"]: result for result in sorted(run["results"], key=lambda r: r["length"]) if
            "reason" not in result}  # fmt: skip


def comparisons(report: dict) -> list[dict]:
    """Each variant against the first of its stage and number of heads, at their longest common length."""
    rows = []
    for run in report["runs"]:
        base = next(r for r in report["runs"] if (r["stage"], r["heads"]) == (run["stage"], run["heads"]))
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


def write(report: dict, folder: Path) -> None:
    options = report["options"]
    devices = sorted({run["device"] for run in report["runs"] if run["device"]})
    lines = [
        "# Medusa", "",
        f"{options['gpus']} x {', '.join(devices)}; {options['layers']} layers, hidden {options['hidden']}, vocabulary "
        f"{options['vocabulary']}, batch {options['batch']}, {options['optimizer']}.", "",
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
        plot(report, stage, heads, folder / name)
        lines += ["", f"![Stage {stage}, {heads} heads]({name})"]
    (folder / "medusa.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def plot(report: dict, stage: int, heads: int, path: Path) -> None:
    """Memory and speed against length; a cross at the length at which memory ended."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths: set[int] = set()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run in report["runs"]:
        if (run["stage"], run["heads"]) != (stage, heads) or not (done := measured(run)):
            continue
        values = {"peak memory, GiB": [r["peak_bytes"] / GIB for r in done.values()],
                  "tokens/s": [r["tokens_per_second"] for r in done.values()]}  # fmt: skip
        lengths |= done.keys()
        failed = [r["length"] for r in run["results"] if r.get("out_of_memory")]
        for axis, (label, y) in zip(axes, values.items(), strict=True):
            (line,) = axis.plot(list(done), y, marker="o", label=run["variant"])
            if any(x > max(done) for x in failed):
                end = min(x for x in failed if x > max(done))
                axis.plot([max(done), end], [y[-1], y[-1]], linestyle=":", color=line.get_color())
                axis.plot(end, y[-1], marker="x", markersize=10, color=line.get_color())
                lengths.add(end)
            axis.set(xlabel="tokens a sequence", ylabel=label)
    for axis in axes:
        axis.set_xscale("log", base=2)
        doublings = [x for x in sorted(lengths) if x % min(lengths) == 0 and (x // min(lengths)).bit_count() == 1]
        axis.set_xticks(doublings, [f"{x:,}" for x in doublings])
        axis.minorticks_off()
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.3)
    if axes[0].lines:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right")
    figure.suptitle(f"Medusa, stage {stage}, {heads} heads (x: out of memory)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
