"""Medusa, stock and with Tigon, at one length after the other: tokens/s, memory and losses in a table.

One H200, Llama-3-8B's shape:    python examples/medusa/compare.py --stages 1 2 --lengths 6144 24576
Four, sharded by FSDP2:          python examples/medusa/compare.py --gpus 4 --lengths 10240
Two CPU cores, in a minute:      python examples/medusa/compare.py --device cpu --layers 2 --hidden 64 \\
                                     --vocabulary 512 --lengths 64 128

Each length of a variant is trained in a process of its own (one for each GPU). A variant ends at the first length that
does not fit.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import GIB, MedusaJob

from tigon.cli.output import write_json
from tigon.memory.levels import MEMORY

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import markdown_table
from benchmarks.train.process import run_process

VARIANTS = ("stock", "stock:checkpoint", "tigon", *(f"tigon:{level}" for level in MEMORY))
PROGRAM = [str(Path(__file__).with_name("measure.py"))]
LEFT = ("stage", "heads", "variant", "note")
TITLES = (*LEFT[:3], "length", "tokens/s", "ratio", "peak GiB", "ratio", "state GiB", "first loss", "note")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; a bad option ends the process with code 2."""
    parser = argparse.ArgumentParser(description="Compare Medusa, stock and with Tigon.")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=["stock", "tigon:lean+mlp"],
                         help="stock, stock:checkpoint (gradient checkpointing), tigon:LEVEL (of memory)")  # fmt: skip
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--gpus", type=int, default=1, help="processes, sharded by FSDP2 if there are several")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("medusa-%Y%m%d-%H%M%S"))
    arguments = parser.parse_args(words)
    for variant in arguments.variants:
        if variant not in VARIANTS:
            parser.error(f"--variants must be among {', '.join(VARIANTS)}, got {variant!r}")
    minima = {
        "steps": 1, "batch": 1, "gpus": 1, "layers": 1, "warmup": 0, "hidden": 16, "vocabulary": 2, "heads": 1,
        "lengths": arguments.heads + 2,
    }  # fmt: skip
    for name, minimum in minima.items():
        value = getattr(arguments, name)
        if min(value if isinstance(value, list) else [value]) < minimum:
            parser.error(f"--{name} must be at least {minimum}, got {value}")
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and arguments.gpus > gpus:
        parser.error(f"--gpus must be at most those that torch sees, {gpus}, got {arguments.gpus}")
    return arguments


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the table of all results in Markdown, with ratios to the first variant at the same stage and length."""
    first: dict[tuple[int, int], dict[str, Any]] = {}
    lines = []
    for result in results:
        cells = [str(result["stage"]), str(result["heads"]), result["variant"], f"{result['length']:,}"]
        if "reason" in result:
            lines.append([*cells, *[""] * 6, result["reason"]])
            continue
        base = first.setdefault((result["stage"], result["length"]), result)
        speed, peak = (result[name] / base[name] for name in ("tokens_per_second", "peak_bytes"))
        lines.append([
            *cells, f"{result['tokens_per_second']:,.0f}", f"{speed:.2f}x", f"{result['peak_bytes'] / GIB:.2f}",
            f"{peak:.2f}x", f"{result['state_bytes'] / GIB:.2f}", f"{result['losses'][0]:.4f}", "",
        ])  # fmt: skip
    return markdown_table(TITLES, lines, LEFT)


def main(words: list[str] | None = None) -> int:
    """Train all variants and write the results; return 1 if a length failed for another reason than memory."""
    options = parse(words)
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    code = 0
    for stage in options.stages:
        for variant in options.variants:
            for length in sorted(options.lengths):
                job = MedusaJob(
                    variant, stage, options.heads, options.layers, options.hidden, options.vocabulary, options.batch,
                    length, options.optimizer, options.warmup, options.steps, options.device, options.gpus,
                )  # fmt: skip
                log = options.out / f"{variant}-{stage}-{length}.log"
                numbers = run_process(vars(job), log, PROGRAM)
                result = {"stage": stage, "heads": options.heads, "variant": variant, "length": length}
                if numbers["status"] == "ok":
                    tokens = options.gpus * options.batch * length * len(numbers["seconds"])
                    results.append(result | numbers | {"tokens_per_second": tokens / sum(numbers["seconds"])})
                else:
                    failed = numbers["status"] == "error"
                    reason = " ".join(numbers["note"].split())[:300] if failed else "out of memory"
                    results.append(result | {"reason": reason})
                    code |= failed
                print("\n".join([*table(results), ""]), flush=True)
                write_json(options.out / "medusa.json", {"options": vars(options) | {"out": ""}, "results": results})
                if "reason" in results[-1]:
                    break
    print(f"Written to {options.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
