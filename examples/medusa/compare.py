"""Medusa, stock and with Tigon, at growing lengths until memory ends: tokens/s, memory, pictures and a table.

One H200, Llama-3-8B's shape:    python examples/medusa/compare.py --stages 1 2 --heads 5
Four, sharded by FSDP2:          python examples/medusa/compare.py --gpus 4
Two CPU cores, in a minute:      python examples/medusa/compare.py --device cpu --layers 2 --hidden 64 \\
                                     --vocabulary 512 --first 64 --longest 512

The first variant doubles its length until memory ends, then halves the gap. The others are measured at its lengths,
then at multiples of its longest one. Each variant of a stage and a number of heads is a process of its own
(one for each GPU) that takes one length after the other.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Job
from report import measured, write
from worker import Worker

from tigon.hf.levels import LEVELS

VARIANTS = ("stock", "stock:checkpoint", "tigon", *(f"tigon:{level}" for level in LEVELS))


def sweep_first(worker: Worker, first: int, longest: int, bisections: int) -> Iterator[dict]:
    """`first`, twice as long, and so on until memory ends or `longest` is reached; then between what fits and not."""
    length, fits = first, 0
    while length <= longest:
        yield (result := worker.measure(length))
        if "reason" in result:
            break
        fits, length = length, 2 * length
    if fits and result.get("out_of_memory"):
        for _ in range(bisections):
            between = (fits + length) // 2
            yield (result := worker.measure(between))
            fits, length = (fits, between) if "reason" in result else (between, length)


def sweep_others(worker: Worker, reference: list[dict], multiples: list[int], longest: int) -> Iterator[dict]:
    """The lengths that the first variant could do, then multiples of its longest, until memory ends."""
    done = sorted(result["length"] for result in reference if "seconds" in result)
    lengths = done + [done[-1] * multiple for multiple in sorted(set(multiples))]
    for length in lengths:
        if length > longest:
            break
        yield (result := worker.measure(length))
        if "reason" in result:
            break


def parse(given: list[str] | None = None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description="Compare Medusa, stock and with Tigon.")
    options.add_argument("--stages", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    options.add_argument("--heads", type=int, nargs="+", default=[3, 5])
    options.add_argument("--variants", nargs="+", default=["stock", "tigon:lean+mlp"],
                         help="stock, stock:checkpoint (gradient checkpointing), tigon:LEVEL (its memory)")  # fmt: skip
    options.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    options.add_argument("--first", type=int, default=2048, help="length to begin with")
    options.add_argument("--longest", type=int, default=2**20, help="length to end with")
    options.add_argument("--multiples", type=int, nargs="+", default=[2, 4, 8, 16, 32],
                         help="of the first variant's longest length, for the others")  # fmt: skip
    options.add_argument(
        "--bisections", type=int, default=2, help="lengths to try where the first variant's memory ends"
    )
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--warmup", type=int, default=2)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--seconds", type=float, default=6.0,
                         help="for the steps of a length after its first; one is always done")  # fmt: skip
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--intermediate", type=int, help="default: 3.5 times hidden")
    options.add_argument("--vocabulary", type=int, default=128256)
    options.add_argument("--gpus", type=int, default=1, help="processes, sharded by FSDP2 if there are several")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    options.add_argument("--out", type=Path, default=Path("runs") / time.strftime("medusa-%Y%m%d-%H%M%S"))
    arguments = options.parse_args(given)
    for variant in arguments.variants:
        if variant not in VARIANTS:
            options.error(f"--variants must be among {', '.join(VARIANTS)}, got {variant!r}")
    at_least = {
        "first": 1, "longest": arguments.first, "steps": 1, "batch": 1, "gpus": 1, "layers": 1, "warmup": 0,
        "bisections": 0, "hidden": 16, "intermediate": 1, "vocabulary": 2, "multiples": 2,
    }  # fmt: skip
    for name, least in at_least.items():
        value = getattr(arguments, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < least:
            options.error(f"--{name} must be at least {least}, got {value}")
    if not arguments.seconds > 0:
        options.error(f"--seconds must be positive, got {arguments.seconds}")
    seen = torch.cuda.device_count()
    if arguments.device == "cuda" and arguments.gpus > seen:
        options.error(f"--gpus must be at most those that torch sees, {seen}, got {arguments.gpus}")
    if min(arguments.heads) < 1 or arguments.first <= max(arguments.heads) + 1:
        options.error(f"--heads must be at least 1 and below --first - 1, got {arguments.heads}")
    return arguments


def save(report: dict, folder: Path) -> None:
    file = folder / "medusa.json"
    file.with_suffix(".new").write_text(json.dumps(report, indent=1), encoding="utf-8")
    file.with_suffix(".new").replace(file)  # whole at any moment
    write(report, folder)


def main(given: list[str] | None = None) -> int:
    """The exit code: 1 if a length could not be measured for another reason than memory."""
    arguments = parse(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}, "runs": []}
    for stage in arguments.stages:
        for heads in arguments.heads:
            reference: list[dict] = []  # of the first variant that could do a length
            for variant in arguments.variants:
                job = Job(
                    variant, stage, heads, arguments.layers, arguments.hidden,
                    arguments.intermediate or arguments.hidden * 7 // 2, arguments.vocabulary, arguments.batch,
                    arguments.optimizer, arguments.warmup, arguments.steps, arguments.seconds, arguments.device,
                    arguments.gpus,
                )  # fmt: skip
                print(f"stage {stage}, {heads} heads, {variant}", flush=True)
                worker, results = Worker(job), []
                run = {"stage": stage, "heads": heads, "variant": variant, "results": results}
                report["runs"].append(run)
                if reference:
                    sweep = sweep_others(worker, reference, arguments.multiples, arguments.longest)
                else:
                    sweep = sweep_first(worker, arguments.first, arguments.longest, arguments.bisections)
                try:
                    with worker:
                        for result in sweep:
                            results.append(result)
                finally:  # what was measured is not lost if this run or the next is stopped
                    run |= {"device": worker.device, "memory_bytes": worker.memory_bytes}
                    save(report, arguments.out)
                if not reference and measured(run):
                    reference = results
    print((arguments.out / "medusa.md").read_text(encoding="utf-8"))
    print(f"Written to {arguments.out}")
    failed = [result for run in report["runs"] for result in run["results"] if "reason" in result]
    return int(any(not result["out_of_memory"] for result in failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without the processes that it started
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted: the report holds the lengths that were done")
        sys.exit(130)
