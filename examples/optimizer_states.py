"""Train one model with each format of `tigon.AdamW`, and compare the loss curves with those of fp32 states and masters.

Each run trains a Llama with random weights in bf16 on real text. The reference has fp32 moments and fp32 master
weights, with several seeds of the weights and of the order of the text: their distance is the noise of a seed. Every
other format uses the first seed. Each run is also evaluated on text that no run trains on.

    python examples/optimizer_states.py --out states                                       # on a GPU: one minute a run
    python examples/optimizer_states.py --out states --size tiny --steps 20 --device cpu   # a trial on a CPU
    python examples/optimizer_states.py --out states --plot                                # the picture alone

It writes `states/curves.json` after each run, and `states/curves.png` at the end if matplotlib is installed.
"""

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import tigon

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.train.text import batches, read_text, tokenise

SIZES: dict[str, dict[str, Any]] = {
    # 134 million parameters, 9 million of which are the embedding.
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "heads": 16, "vocab_size": 8192},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "heads": 16, "vocab_size": 16384},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "heads": 4, "vocab_size": 1024},
}
REFERENCE = "fp32, fp32"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"state": "fp32", "master": "fp32"},
    "8bit, bf16+8": {"state": "8bit", "master": "bf16+8"},
    "bf16": {},
    "8bit, stochastic": {"state": "8bit", "stochastic_rounding": True},
    "bf16, stochastic": {"stochastic_rounding": True},
    "8bit, fp32": {"state": "8bit", "master": "fp32"},
    "fp32, bf16+8": {"state": "fp32", "master": "bf16+8"},
}
# Losses are averaged over this part of a run for the curves, and over the last part for the table.
WINDOW = 0.05


def build(size: str, seed: int, device: str) -> torch.nn.Module:
    """Return a patched model in bf16."""
    fields = dict(SIZES[size])
    heads = fields.pop("heads")
    config = transformers.LlamaConfig(
        **fields, num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=False
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device, torch.bfloat16)
    tigon.patch(model)
    return model.train()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up over a tenth of the run, then a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: Tensor, batch: int) -> Tensor:
    """Return the mean loss of rows of tokens."""
    losses = [model(input_ids=x, labels=x, use_cache=False).loss.float() for x in rows.split(batch)]
    return torch.stack(losses).mean()


def train(options: dict[str, Any], seed: int, arguments: argparse.Namespace, text: tuple[Path, Tensor]) -> dict:
    """Train one model, and return its losses, its losses on other text, and the bytes of its states."""
    model = build(arguments.size, seed, arguments.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = tigon.AdamW(
        groups, lr=arguments.lr, betas=(0.9, arguments.beta2), weight_decay=0.1, max_grad_norm=1.0, **options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, arguments.steps))
    path, held_out = text[0], text[1].to(arguments.device)
    every = max(1, arguments.steps // 10)
    losses, norms, evaluations, start = [], [], {}, time.perf_counter()
    for step, x in zip(range(arguments.steps), batches(path, arguments.batch, arguments.seq, seed), strict=False):
        x = x.to(arguments.device, non_blocking=True)
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
        if (step + 1) % every == 0 or step + 1 == arguments.steps:
            evaluations[step + 1] = evaluate(model, held_out, arguments.batch)
    values = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
    return {
        "losses": torch.stack(losses).tolist(),
        "norms": torch.stack(norms).tolist(),
        "evaluations": {step: x.item() for step, x in evaluations.items()},
        "state_bytes_per_parameter": sum(x.nbytes for x in values) / sum(p.numel() for p in model.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - start,
    }


def make_text(arguments: argparse.Namespace, folder: Path) -> tuple[Path, Tensor]:
    """Return the file of the tokens to train on, and rows of other tokens [rows, seq]."""
    tokens = np.load(tokenise(read_text(arguments.text), SIZES[arguments.size]["vocab_size"]).path)
    rows = 4 * arguments.batch
    held_out = tokens[-rows * arguments.seq :].reshape(rows, arguments.seq)
    path = folder / "tokens.npy"
    np.save(path, tokens[: -rows * arguments.seq])
    return path, torch.from_numpy(held_out.astype(np.int64))


# --- results -------------------------------------------------------------------------------------


def last_loss(run: dict) -> float:
    """Return the mean loss of the last steps of a run."""
    losses = run["losses"]
    return statistics.mean(losses[-max(1, round(WINDOW * len(losses))) :])


def summarise(runs: dict[str, dict]) -> str:
    """Return a table of all runs. The first line is the noise of a seed."""
    references = [run for name, run in runs.items() if name.startswith(f"{REFERENCE} ")]
    ends = [last_loss(run) for run in references]
    others = [list(run["evaluations"].values())[-1] for run in references]
    lines = [
        f"reference, {len(ends)} seeds: loss {min(ends):.4f} to {max(ends):.4f}, on other text {min(others):.4f} to "
        f"{max(others):.4f}"
    ]
    lines.append(f"{'run':28} {'loss':>8} {'- ref.':>8} {'other text':>11} {'- ref.':>8} {'bytes/p':>8} {'s':>6}")
    for name, run in runs.items():
        other = list(run["evaluations"].values())[-1]
        lines.append(
            f"{name:28} {last_loss(run):8.4f} {last_loss(run) - ends[0]:+8.4f} {other:11.4f} {other - others[0]:+8.4f} "
            f"{run['state_bytes_per_parameter']:8.2f} {run['seconds']:6.1f}"
        )
    return "\n".join(lines)


def smooth(losses: list[float]) -> np.ndarray:
    """Return the moving average of losses, without the steps at the start that have no full window."""
    window = max(1, round(WINDOW * len(losses)))
    return np.convolve(losses, np.ones(window) / window, "valid")


def describe(runs: dict[str, dict]) -> str:
    """Return the size of the model and the number of steps for the picture."""
    first = next(iter(runs.values()))
    return f"{first['parameters'] / 1e6:,.0f} million parameters, {len(first['losses'])} steps"


def plot(runs: dict[str, dict], path: Path) -> None:
    """Draw the curves, and the distance of each on other text from the reference, beside the noise of a seed."""
    from benchmarks.figures import INK, clean, headline, new_figure

    figure = new_figure(10, 4.6)
    headline(figure, "Formats of AdamW's states and master weights", f"{describe(runs)}, bf16 parameters and gradients")
    left, right = figure.subplots(1, 2)
    references = {name: run for name, run in runs.items() if name.startswith(f"{REFERENCE} ")}
    first = next(iter(references.values()))
    for name, run in runs.items():
        is_reference = name in references
        curve = smooth(run["losses"])
        steps = np.arange(len(run["losses"]) - len(curve) + 1, len(run["losses"]) + 1)
        style = {"color": "black", "linestyle": "-" if run is first else ":"} if is_reference else {}
        left.plot(steps, curve, label=name, linewidth=1.2, **style)
        points = [int(step) for step in run["evaluations"]]
        pairs = zip(run["evaluations"].values(), first["evaluations"].values(), strict=True)
        if run is not first:
            right.plot(points, [a - b for a, b in pairs], label=name, linewidth=1.2, marker="o", markersize=3, **style)
    left.set_ylabel("loss, moving average", color=INK)
    right.set_ylabel("loss on other text, minus that of the first seed in fp32", color=INK, fontsize=8)
    right.axhline(0, color="black", linewidth=0.8)
    for axes in (left, right):
        clean(axes)
        axes.set_xlabel("step", color=INK)
    left.legend(fontsize=7, frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("states"))
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of the reference")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--text", type=Path, help="file or folder; default: the sources of the Python standard library")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plot", action="store_true", help="draw the runs in --out, and train nothing")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "curves.json"
    settings = {name: str(x) if isinstance(x, Path) else x for name, x in vars(arguments).items()}
    runs: dict[str, dict] = {}
    if arguments.plot:
        runs = json.loads(path.read_text())["runs"]
    else:
        text = make_text(arguments, arguments.out)
        pairs = [(name, 0) for name in arguments.formats]
        extra_seeds = (
            [(REFERENCE, seed) for seed in range(1, arguments.seeds)] if REFERENCE in arguments.formats else []
        )
        for name, seed in pairs[:1] + extra_seeds + pairs[1:]:
            label = f"{name} seed {seed}" if name == REFERENCE else name
            try:
                runs[label] = run = train(FORMATS[name], seed, arguments, text)
            except Exception:
                print(f"{label}: {traceback.format_exc()}", flush=True)
                continue
            print(f"{label:28} loss {last_loss(run):.4f}, {run['seconds']:.1f} s", flush=True)
            path.write_text(json.dumps({"settings": settings, "runs": runs}))
        (arguments.out / "tokens.npy").unlink()
    print(summarise(runs))
    try:
        plot(runs, path.with_suffix(".png"))
    except ImportError as error:
        print(f"There is no picture: {error}")


if __name__ == "__main__":
    main()
