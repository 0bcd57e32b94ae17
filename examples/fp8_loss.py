"""Train a Llama of about a billion parameters from scratch, in bf16 and with FP8 products, and compare the losses.

Each run trains the same random weights on the same batches of real text, with AdamW in bf16. The losses of FP8 runs are
compared with those of the bf16 run, and so are those of other bf16 runs, which add the same numbers in another order:
the sequences of each batch come in another order. Their differences are the noise of bf16. Any change of rounding makes
a training run differ by this much after some hundred steps.

    python examples/fp8_loss.py --out fp8                               # five runs of 1000 steps on one H200
    python examples/fp8_loss.py --out fp8 --runs bf16,tensorwise        # some of them; the others are read from --out
    python examples/fp8_loss.py --out fp8 --runs "" --also other        # only draw, from two folders
    python examples/fp8_loss.py --out fp8 --bf16-steps 700              # FP8 only from step 700 on
    python examples/fp8_loss.py --out fp8 --size tiny --steps 8         # a trial on a CPU

It writes a JSON file for each run, fp8_loss.json with the comparison, and fp8_loss.png.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import tigon
from tigon.hf import fp8

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.train.text import MIN_VOCAB, read_text, tokenise

SIZES = {
    # The layers of Llama 3.2 1B: 973 million parameters, and 65 million in the embeddings.
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32_000,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024,
    },
}  # fmt: skip
# The run that all others are compared with.
REFERENCE = "bf16"
# The runs in bf16 that rotate the sequences of a batch by this number.
ORDERS = {"bf16-order-1": 1, "bf16-order-2": 3}
RECIPES = ("tensorwise", "rowwise")
RUNS = (REFERENCE, *ORDERS, *RECIPES)
COLOURS = {"tensorwise": "#7b3fa0", "rowwise": "#d55e00"}
# The steps over which differences are averaged in the picture and at the end.
WINDOW = 50
# The difference from bf16 that is allowed at the end, relative to the loss.
LIMIT = 0.005


# --- training ------------------------------------------------------------------------------------


def read_batches(options: argparse.Namespace, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Return the batches of all steps [steps, batch, seq], batches for evaluation, and the number of tokens."""
    tokens = tokenise(read_text(options.text), max(MIN_VOCAB, vocabulary))
    values = np.load(tokens.path, mmap_mode="r")
    windows = torch.from_numpy(values[: len(values) // options.seq * options.seq].astype(np.int64)).view(
        -1, options.seq
    )
    # The windows of the evaluation are spread over the text, and are never trained on.
    held_out = torch.zeros(len(windows), dtype=torch.bool)
    held_out[:: max(2, len(windows) // (4 * options.batch))] = True
    rest, generator = windows[~held_out], torch.Generator().manual_seed(0)
    count, order = options.steps * options.batch, []
    while len(order) < count:
        order += torch.randperm(len(rest), generator=generator).tolist()
    evaluation = windows[held_out]
    evaluation = evaluation[: len(evaluation) // options.batch * options.batch].view(-1, options.batch, options.seq)
    return rest[order[:count]].view(options.steps, options.batch, options.seq), evaluation, tokens.count


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Return the rate of a step: a linear warm-up, then a cosine that ends at a tenth."""
    warmup = max(1, options.steps // 20)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def patch(model: nn.Module, recipe: str | None, options: argparse.Namespace) -> str:
    """Patch the model for a run, and return the report."""
    if recipe is None:
        return str(tigon.patch(model))
    return str(tigon.patch(model, fp8=recipe, fp8_dw=options.fp8_dw))


def train(name: str, options: argparse.Namespace, batches: Tensor, evaluation: Tensor) -> dict[str, Any]:
    """Train one run and return its losses and facts."""
    recipe, shift = name if name in RECIPES else None, ORDERS.get(name, 0)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES[options.size], max_position_embeddings=options.seq, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    report = patch(model, None if options.bf16_steps else recipe, options)
    optimizer = tigon.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = torch.empty(options.steps, device=options.device)
    start = time.perf_counter()
    for step, rows in enumerate(batches):
        if recipe is not None and step == options.bf16_steps > 0:
            report = patch(model, recipe, options)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        ids = rows.roll(shift, 0).to(options.device, non_blocking=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if (step + 1) % max(1, options.steps // 10) == 0:
            # Only these steps wait for the GPU.
            seconds = time.perf_counter() - start
            print(f"{name}: step {step + 1}, loss {losses[step].item():.4f}, {seconds:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        evaluated = [
            model(input_ids=rows.to(options.device), labels=rows.to(options.device), skip_logits=True).loss
            for rows in evaluation
        ]
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "name": name, "size": options.size, "steps": options.steps, "batch": options.batch, "seq": options.seq,
        "lr": options.lr, "bf16_steps": options.bf16_steps, "fp8_dw": options.fp8_dw, "parameters": parameters,
        "seconds": seconds, "device": device_name(options.device), "report": report, "losses": losses.tolist(),
        "evaluation": torch.stack(evaluated).mean().item(),
    }  # fmt: skip


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


# --- the comparison ------------------------------------------------------------------------------


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the last `window` values at each step; of fewer values at the first steps."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the difference of each run from bf16, relative to the loss, and the noise."""
    reference = np.array(runs[REFERENCE]["losses"])
    window = min(WINDOW, max(1, len(reference) // 4))
    relative = {name: np.array(run["losses"]) / reference - 1 for name, run in runs.items() if name != REFERENCE}
    smoothed = {name: smooth(values, window) for name, values in relative.items()}
    noise = [smoothed[name] for name in ORDERS if name in smoothed]
    # The band is two standard deviations of the noise of nearby steps, whose mean is zero.
    band = 2 * np.sqrt(smooth(np.mean(np.square(noise), 0), 4 * window)) if noise else None
    half = len(reference) // 2
    results = {}
    for name, values in relative.items():
        last, middle = values[-window:].mean(), values[half - window // 2 : half + window - window // 2].mean()
        results[name] = {
            "last": float(last), "middle": float(middle), "drift": float(last - middle),
            "rms": float(np.sqrt(np.mean(np.square(values)))),
            "noise_band": None if band is None else float(band[-1]), "within_limit": bool(abs(last) <= LIMIT),
            "evaluation": runs[name]["evaluation"] / runs[REFERENCE]["evaluation"] - 1,
        }  # fmt: skip
    differences = {name: values.tolist() for name, values in smoothed.items()}
    return {
        "window": window,
        "results": results,
        "smoothed": differences,
        "band": None if band is None else band.tolist(),
    }


def draw(path: Path, runs: dict[str, dict[str, Any]], comparison: dict[str, Any]) -> None:
    """Draw the losses, and below them the smoothed differences from bf16 with the band of the noise."""
    from benchmarks.figures import FAINT, INK, MUTED, STOCK, clean, headline, mark_limit, new_figure

    reference = runs[REFERENCE]
    steps = range(1, reference["steps"] + 1)
    figure = new_figure(7.6, 5.6)
    size = f"{reference['parameters'] / 1e6:,.0f} million parameters, {reference['batch']} x {reference['seq']} tokens"
    headline(figure, "Training with FP8 products, against bf16", f"{size} a step, AdamW, {reference['device']}")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1.5))
    above.plot(steps, reference["losses"], color=STOCK, linewidth=4, alpha=0.5, label="bf16")
    for name, colour in COLOURS.items():
        if name in runs:
            above.plot(steps, runs[name]["losses"], color=colour, linewidth=0.8, label=f"FP8, {name}")
    above.set_ylabel("loss", color=INK)
    above.legend(frameon=False, labelcolor=INK, fontsize=9)
    if comparison["band"] is not None:
        band = 100 * np.array(comparison["band"])
        below.fill_between(steps, -band, band, color=FAINT, linewidth=0, label="bf16 with reordered sums: 2 sigma")
    for name, values in comparison["smoothed"].items():
        colour, label = COLOURS.get(name, MUTED), f"FP8, {name}" if name in COLOURS else None
        below.plot(steps, 100 * np.array(values), color=colour, linewidth=1.3 if label else 0.7, label=label)
    mark_limit(below, 100 * LIMIT, f"{100 * LIMIT:g} %")
    mark_limit(below, -100 * LIMIT, "")
    # The first steps fall so fast that their differences say nothing.
    late = [100 * abs(v) for values in comparison["smoothed"].values() for v in values[len(values) // 10 :]]
    height = 1.6 * max([100 * LIMIT, *late])
    below.set_ylim(-height, height)
    below.set_ylabel(f"loss against bf16, %\n(mean of {comparison['window']} steps)", color=INK)
    below.set_xlabel("step", color=INK)
    below.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper right", ncols=3)
    for axes in (above, below):
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        clean(axes)
    figure.savefig(path)


# --- the command ---------------------------------------------------------------------------------


def read_runs(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the runs in the folders that were trained with the same settings as these options."""
    runs = {}
    for folder in (options.also, options.out):
        for name in RUNS if folder is not None else ():
            if (file := folder / f"{name}.json").exists():
                runs[name] = json.loads(file.read_text())
    settings = {(run["size"], run["steps"], run["batch"], run["seq"], run["lr"]) for run in runs.values()}
    if len(settings) > 1:
        raise SystemExit(f"fp8_loss.py: the runs in the folders have different settings: {sorted(settings)}")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--also", type=Path, help="another folder with runs")
    parser.add_argument("--runs", default=",".join(RUNS), help="runs to train, of " + ", ".join(RUNS))
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--bf16-steps", type=int, default=0, help="steps in bf16 before FP8 begins")
    parser.add_argument("--no-fp8-dw", dest="fp8_dw", action="store_false", help="keep dW in bf16")
    parser.add_argument("--text", type=Path, help="file or folder; default: the sources of the Python standard library")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    names = [name.strip() for name in options.runs.split(",") if name.strip()]
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"--runs must be among {', '.join(RUNS)}, got {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.size == "tiny":
        # The layers are narrower than those that FP8 pays for.
        fp8.NARROWEST = 1
    if names:
        batches, evaluation, count = read_batches(options, SIZES[options.size]["vocab_size"])
        print(
            f"{count:,} tokens of text, {batches.numel():,} trained, {evaluation.numel():,} for evaluation", flush=True
        )
    for name in names:
        run = train(name, options, batches, evaluation)
        (options.out / f"{name}.json").write_text(json.dumps(run))
        milliseconds = 1e3 * run["seconds"] / options.steps
        print(f"{name}: {milliseconds:.1f} ms a step, evaluation loss {run['evaluation']:.4f}", flush=True)
    runs = read_runs(options)
    if REFERENCE not in runs or len(runs) < 2:
        print(f"There is nothing to compare yet: {', '.join(runs) or 'no runs'}")
        return
    comparison = compare(runs)
    (options.out / "fp8_loss.json").write_text(json.dumps(comparison))
    print(f"\nloss against bf16, mean of the last {comparison['window']} steps, and the change since the middle")
    for name, result in comparison["results"].items():
        band = "" if result["noise_band"] is None else f", noise {100 * result['noise_band']:.3f} %"
        verdict = "within" if result["within_limit"] else "OUTSIDE OF"
        print(
            f"{name:<14} {100 * result['last']:+.3f} %, drift {100 * result['drift']:+.3f} %, "
            f"evaluation {100 * result['evaluation']:+.3f} %{band}; {verdict} {100 * LIMIT:g} %"
        )
    draw(options.out / "fp8_loss.png", runs, comparison)


if __name__ == "__main__":
    main()
