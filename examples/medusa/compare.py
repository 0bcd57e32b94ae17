"""Medusa, stock and with Tigon, at growing lengths until memory runs out: tokens/s, memory, pictures and a table.

One H200, Llama-3-8B's shape:    python examples/medusa/compare.py --stages 1 2 --heads 5
Four, sharded by FSDP2:          python examples/medusa/compare.py --gpus 4
Two CPU cores, in a minute:      python examples/medusa/compare.py --device cpu --layers 2 --hidden 64 \\
                                     --vocabulary 512 --first 64 --longest 512

The first variant doubles its length until memory runs out, then tries lengths between the last one that fitted and the
first one that did not. The others are measured at its lengths, then at multiples of its longest one. Each variant of a
stage and a number of heads has a process (one for each GPU), which trains one length after the other.
"""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import MedusaJob
from report import measured_results, write_report

from tigon.cli.output import write_json
from tigon.memory.levels import MEMORY

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.train.child import Event, Worker
from benchmarks.train.search import Search
from benchmarks.train.turns import TrainingRun, train_in_turns

VARIANTS = ("stock", "stock:checkpoint", "tigon", *(f"tigon:{level}" for level in MEMORY))

# Without this setting, sequences of growing length would fragment the memory until none of them fits.
SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PROGRAM = [str(Path(__file__).with_name("measure.py"))]


class VariantRun(TrainingRun):
    """One variant of a stage and a number of heads, and its result at each length."""

    job: MedusaJob

    def __init__(self, job: MedusaJob, search: Search) -> None:
        super().__init__(job.variant, job, search)
        self.results: list[dict[str, Any]] = []

    def make_worker(self) -> Worker:
        return Worker(self.job, None, self.listen, PROGRAM, SETTINGS)

    def point(self) -> str:
        return str(self.size)

    def record(self, event: Event) -> None:
        """Store and print seconds, loss and peak at the length, or the reason why there are none."""
        kind = event["event"]
        result: dict[str, Any] = {"length": self.size}
        if kind == "point":
            tokens = self.job.ranks * self.job.batch * self.size
            speed = tokens * len(event["seconds"]) / sum(event["seconds"])
            result |= {"seconds": event["seconds"], "loss": event["losses"][0], "peak_bytes": event["peak_bytes"]}
            result |= {"state_bytes": event["state_bytes"], "tokens_per_second": speed}
            text = f"{speed:>9,.0f} tokens/s  peak {event['peak_bytes'] / 2**30:6.2f} GiB"
        else:
            result |= {"out_of_memory": kind == "out of memory", "reason": event["reason"][:500]}
            text = kind if kind == "out of memory" else result["reason"]
        print(f"  {self.size:>8,} tokens  {text}", flush=True)
        self.results.append(result)


def make_search(reference: list[dict[str, Any]], arguments: argparse.Namespace) -> Search:
    """Return the lengths of a variant; `reference` are the results of the first variant, if there are any.

    The first variant doubles its length, then halves the gap between the last length that fitted and the first that did
    not. The others take the lengths that fitted there, then multiples of the longest.
    """
    if not reference:
        return Search([arguments.first], doubling=True, limit=arguments.longest, bisections=arguments.bisections)
    fitting_lengths = sorted(result["length"] for result in reference if "seconds" in result)
    lengths = fitting_lengths + [fitting_lengths[-1] * multiple for multiple in sorted(set(arguments.multiples))]
    return Search([length for length in lengths if length <= arguments.longest])


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; a bad option ends the process with code 2."""
    parser = argparse.ArgumentParser(description="Compare Medusa, stock and with Tigon.")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--heads", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--variants", nargs="+", default=["stock", "tigon:lean+mlp"],
                         help="stock, stock:checkpoint (gradient checkpointing), tigon:LEVEL (of memory)")  # fmt: skip
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--first", type=int, default=2048, help="the first length")
    parser.add_argument("--longest", type=int, default=2**20, help="the longest length that any variant tries")
    parser.add_argument("--multiples", type=int, nargs="+", default=[2, 4, 8, 16, 32],
                         help="the other variants try these multiples of the first one's longest length")  # fmt: skip
    parser.add_argument(
        "--bisections",
        type=int,
        default=2,
        help="lengths to try between the last that fitted and the first that did not",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0,
                         help="time limit of a length after its first step; at least one step is timed")  # fmt: skip
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, help="default: 3.5 times hidden")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--gpus", type=int, default=1, help="processes, sharded by FSDP2 if there are several")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("medusa-%Y%m%d-%H%M%S"))
    arguments = parser.parse_args(words)
    for variant in arguments.variants:
        if variant not in VARIANTS:
            parser.error(f"--variants must be among {', '.join(VARIANTS)}, got {variant!r}")
    minima = {
        "first": 1, "longest": arguments.first, "steps": 1, "batch": 1, "gpus": 1, "layers": 1, "warmup": 0,
        "bisections": 0, "hidden": 16, "intermediate": 1, "vocabulary": 2, "multiples": 2,
    }  # fmt: skip
    for name, minimum in minima.items():
        value = getattr(arguments, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < minimum:
            parser.error(f"--{name} must be at least {minimum}, got {value}")
    if not arguments.seconds > 0:
        parser.error(f"--seconds must be positive, got {arguments.seconds}")
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and arguments.gpus > gpus:
        parser.error(f"--gpus must be at most those that torch sees, {gpus}, got {arguments.gpus}")
    if min(arguments.heads) < 1 or arguments.first <= max(arguments.heads) + 1:
        parser.error(f"--heads must be at least 1 and below --first - 1, got {arguments.heads}")
    return arguments


def main(words: list[str] | None = None) -> int:
    """Train all variants and write the report; return 1 if a length failed for another reason than memory."""
    arguments = parse(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    report: dict[str, Any] = {"options": options, "runs": []}
    for stage in arguments.stages:
        for heads in arguments.heads:
            # These are the results of the first variant for which any length fitted.
            reference: list[dict[str, Any]] = []
            for variant in arguments.variants:
                job = MedusaJob(
                    variant, stage, heads, arguments.layers, arguments.hidden,
                    arguments.intermediate or arguments.hidden * 7 // 2, arguments.vocabulary, arguments.batch,
                    arguments.optimizer, arguments.warmup, arguments.steps, arguments.seconds, arguments.device,
                    arguments.gpus,
                )  # fmt: skip
                print(f"stage {stage}, {heads} heads, {variant}", flush=True)
                run = VariantRun(job, make_search(reference, arguments))
                entry = {"stage": stage, "heads": heads, "variant": variant, "results": run.results}
                report["runs"].append(entry)
                try:
                    train_in_turns([run])
                finally:
                    # Write the results of the completed lengths even if this run or the next one is interrupted.
                    entry |= {name: run.facts.get(name) for name in ("device", "memory_bytes")}
                    write_json(arguments.out / "medusa.json", report)
                    write_report(report, arguments.out)
                if not reference and measured_results(entry):
                    reference = run.results
    print((arguments.out / "medusa.md").read_text(encoding="utf-8"))
    print(f"Written to {arguments.out}")
    failures = [result for entry in report["runs"] for result in entry["results"] if "reason" in result]
    return int(any(not result["out_of_memory"] for result in failures))


if __name__ == "__main__":
    # SIGTERM raises SystemExit, so that the processes of the variants end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted: the report has the lengths that were done")
        sys.exit(130)
