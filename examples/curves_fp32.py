"""Measure how far the loss curve of a patched model lies from the stock curve in fp32.

For each model type the script trains the same small model many times on one fixed batch of random tokens: stock, stock
with its initial parameters moved by one unit in the last place, stock with sums in another order, and patched. It also
compares the gradients of the first step with fp64, and counts the tokens that a router sends to other experts.

    python examples/curves_fp32.py --out curves.json                                    # on a GPU
    python examples/curves_fp32.py --types llama --size tiny --device cpu --steps 4     # a trial on a CPU

docs/performance.md explains the numbers.
"""

import argparse
import contextlib
import copy
import json
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

# cuBLAS reads this setting before the first product, and is deterministic with it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tigon

SIZES = {
    "small": {"hidden": 1024, "inter": 2048, "layers": 4, "heads": 16, "kv": 4, "head": 64, "vocab": 4096},
    "tiny": {"hidden": 64, "inter": 96, "layers": 2, "heads": 4, "kv": 2, "head": 16, "vocab": 512},
}
# The number of experts per token for each type.
MIXTURES = {"gpt_oss": 2, "llama4_text": 1}
EXPERTS = 8


def build(model_type: str, size: str, length: int, attention: str, seed: int) -> nn.Module:
    """Return a small model of a type, initialised by its own code."""
    s = SIZES[size]
    fields = {
        "hidden_size": s["hidden"], "intermediate_size": s["inter"], "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["kv"], "head_dim": s["head"],
        "vocab_size": s["vocab"], "max_position_embeddings": length, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    if model_type in MIXTURES:
        fields |= {
            "intermediate_size": s["inter"] // 2, "num_local_experts": EXPERTS,
            "num_experts_per_tok": MIXTURES[model_type],
        }  # fmt: skip
    if model_type == "gpt_oss":
        fields |= {
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "sliding_window": length // 2,
            "layer_types": ["sliding_attention", "full_attention"] * (s["layers"] // 2),
        }  # fmt: skip
    if model_type == "llama4_text":
        fields |= {"intermediate_size_mlp": s["inter"], "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    ).train()


# --- fp64 ----------------------------------------------------------------------------------------


class Fp64(TorchFunctionMode):
    """A mode that ignores casts to fp32, except in the rotary tables, which every run computes in fp32."""

    inside_tables = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not self.inside_tables:
            if function is Tensor.float and args[0].dtype == torch.float64:
                return args[0]
            wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
            if wide and kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if wide and function is Tensor.to and len(args) > 1 and args[1] is torch.float32:
                args = (args[0], torch.float64, *args[2:])
        return function(*args, **kwargs)


def step_in_fp64(base: nn.Module, batch: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the stock model in fp64."""
    model = copy.deepcopy(base).double()
    if hasattr(model, "set_experts_implementation"):
        # Grouped products do not support fp64.
        with contextlib.suppress(ValueError):
            model.set_experts_implementation("eager")
    mode = Fp64()

    def run_in_fp32(module: nn.Module) -> None:
        forward = module.forward

        def compute_tables(*args, **kwargs):
            mode.inside_tables = True
            for buffer in module.buffers():
                buffer.data = buffer.data.float()
            try:
                args = [x.float() if x.is_floating_point() else x for x in args]
                return forward(*args, **kwargs)
            finally:
                mode.inside_tables = False

        module.forward = compute_tables

    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            run_in_fp32(module)
    with mode:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    assert loss.dtype == torch.float64, loss.dtype
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- one run -------------------------------------------------------------------------------------


class Routers:
    """Records the logits of every router at every step."""

    def __init__(self, model: nn.Module, choices: int | None) -> None:
        self.logits: list[Tensor] = []
        if choices:
            for module in model.modules():
                if type(module).__name__.endswith("Router"):
                    module.register_forward_hook(self._record)

    def _record(self, module: nn.Module, args: tuple, outputs: tuple) -> None:
        # llama4 returns (scores, logits), gpt_oss returns (logits, weights, indices).
        logits = next(
            x for x in outputs if x.is_floating_point() and x.shape[-1] == EXPERTS and bool((x != 0).all())
        )  # fmt: skip
        self.logits.append(logits.detach().float().reshape(-1, EXPERTS))


def perturb(model: nn.Module, seed: int) -> None:
    """Move every parameter to one of its two neighbours in fp32, at random."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            up = torch.rand(p.shape, device=p.device, generator=generator) < 0.5
            towards = torch.where(up, torch.inf, -torch.inf)
            # The neighbour of zero is a subnormal number, which training cannot tell from zero.
            p.copy_(torch.where(p == 0, p, torch.nextafter(p, towards)))


def train(
    base: nn.Module, batch: Tensor, steps: int, lr: float, choices: int | None, *, patched: bool = False,
    seed: int | None = None, halves: bool = False,
) -> dict:  # fmt: skip
    """Train a copy of `base` and return its losses, router logits and gradients of the first step.

    A `seed` moves the initial parameters by one unit in the last place. With `halves`, the gradient is accumulated over
    the two halves of the batch: the same function in another order.
    """
    model = copy.deepcopy(base)
    if seed is not None:
        perturb(model, seed)
    routers = Routers(model, choices)
    report = ""
    if patched:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = str(tigon.patch(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, result = [], {"report": report}
    for step in range(steps):
        loss = torch.zeros((), device=batch.device)
        pieces = batch.chunk(2) if halves else (batch,)
        for piece in pieces:
            partial = model(input_ids=piece, labels=piece, use_cache=False).loss / len(pieces)
            partial.backward()
            loss = loss + partial.detach()
        losses.append(loss)
        if step == 0:
            result["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    result["losses"] = [x.item() for x in losses]
    result["logits"] = routers.logits
    return result


# --- comparisons ---------------------------------------------------------------------------------


def pattern(name: str) -> str:
    """Name a parameter without the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", name).removeprefix("model.")


def distance(run: dict, stock: dict) -> list[float]:
    """Return the relative distance of the losses, step by step."""
    return [abs(a - b) / abs(b) for a, b in zip(run["losses"], stock["losses"], strict=True)]


def flips(run: dict, stock: dict, choices: int | None, layers: int, halves: bool = False) -> dict | None:
    """Count the tokens that a router sends to other experts than in the stock run, step by step."""
    if not choices or not stock["logits"]:
        return None
    logits = run["logits"]
    # With halves, each layer is called twice in a step.
    if halves:
        logits = [
            torch.cat((logits[s * 2 * layers + i], logits[s * 2 * layers + layers + i]))
            for s in range(len(logits) // (2 * layers))
            for i in range(layers)
        ]  # fmt: skip
    counts, first = [], None
    for i, (a, b) in enumerate(zip(logits, stock["logits"], strict=True)):
        sets = [torch.zeros_like(x, dtype=torch.bool).scatter_(1, x.topk(choices)[1], True) for x in (a, b)]
        different = (sets[0] != sets[1]).any(1)
        counts.append(int(different.sum()))
        if counts[-1] and first is None:
            top = b.sort(descending=True)[0]
            gap = (top[:, choices - 1] - top[:, choices])[different]
            first = {
                "step": i // layers, "layer": i % layers, "gap": gap.max().item(),
                "tokens": different.nonzero().flatten().tolist(),
                "logits_apart": (a - b)[~different].abs().max().item(),
            }  # fmt: skip
    by_step = [sum(counts[i : i + layers]) for i in range(0, len(counts), layers)]
    return {"by_step": by_step, "first": first, "total": sum(by_step)}


def gradient_errors(run: dict, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest relative error of the first gradients of each parameter of all layers."""
    errors: dict[str, float] = {}
    for name, gradient in run["gradients"].items():
        norm = exact[name].norm()
        difference = (gradient.double() - exact[name]).norm()
        error = float(difference / norm) if norm > 0 else float(difference)
        errors[pattern(name)] = max(errors.get(pattern(name), 0.0), error)
    return errors


# --- a model type --------------------------------------------------------------------------------


def measure(model_type: str, options: argparse.Namespace) -> dict:
    """Run everything for one model type."""
    start_time = time.time()
    choices, layers = MIXTURES.get(model_type), SIZES[options.size]["layers"]
    base = build(model_type, options.size, options.length, options.attention, options.seed).to(options.device)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(3, SIZES[options.size]["vocab"], (options.batch, options.length), generator=generator)
    batch = batch.to(options.device)
    runs: dict[str, dict] = {}
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in base.parameters()), "runs": runs, "gradients": {},
        "zero_bias": [n for n, p in base.named_parameters() if not p.any()][:20],
    }  # fmt: skip

    def run(name: str, reference: dict | None = None, **train_options) -> dict:
        curve = train(base, batch, options.steps, options.lr, choices, **train_options)
        reference = reference or curve
        apart = distance(curve, reference)
        runs[name] = {
            "losses": curve["losses"], "apart": apart, "max": max(apart),
            "flips": flips(curve, reference, choices, layers, train_options.get("halves", False)),
        }  # fmt: skip
        seconds = time.time() - start_time
        last = f"\r  {model_type} {len(runs)} runs, {name}: {runs[name]['max']:.1e} apart, {seconds:.0f} s"
        print(last.ljust(100) if sys.stdout.isatty() else last[1:] if len(runs) % 10 == 1 else "", flush=True, end="")
        return curve

    stock = run("stock")
    run("stock again", stock)
    exact_loss, exact = step_in_fp64(base, batch)
    result["loss"] = {"fp64": exact_loss, "stock": stock["losses"][0]}
    tigon_run, in_halves = run("tigon", stock, patched=True), run("stock in halves", stock, halves=True)
    result["loss"]["tigon"], result["report"] = tigon_run["losses"][0], tigon_run["report"]
    for name, curve in {"stock": stock, "tigon": tigon_run, "stock in halves": in_halves}.items():
        result["gradients"][name] = gradient_errors(curve, exact)
    del tigon_run, in_halves
    run("tigon again", stock, patched=True)
    for seed in range(options.seeds):
        moved_stock = run(f"stock moved {seed}", stock, seed=seed)
        # Two runs that begin at the same moved parameters are another sample of the distance between Tigon and stock.
        run(f"tigon from moved {seed}", moved_stock, patched=True, seed=seed)
        run(f"stock in halves from moved {seed}", moved_stock, halves=True, seed=seed)
        del moved_stock
    result["seconds"] = time.time() - start_time
    return result


# --- report --------------------------------------------------------------------------------------


def distances_at_steps(values: list[float]) -> str:
    """Show a curve's distance at a few steps."""
    steps = sorted({0, 1, 2, 4, 8, 16, len(values) - 1} & set(range(len(values))))
    return " ".join(f"{i}:{values[i]:.0e}" for i in steps)


def table(model_type: str, result: dict) -> str:
    """Return the table of a model type."""
    lines: list[str] = []
    add = lines.append
    runs, loss = result["runs"], result["loss"]
    add(
        f"\n== {model_type}: {result['parameters'] / 1e6:.0f} M, loss {runs['stock']['losses'][0]:.4f} -> "
        f"{runs['stock']['losses'][-1]:.4f}, first loss from fp64: stock {loss['stock'] / loss['fp64'] - 1:+.1e}, "
        f"tigon {loss['tigon'] / loss['fp64'] - 1:+.1e}; {result['seconds']:.0f} s"
    )

    def add_run(name: str) -> None:
        r = runs[name]
        flip = r["flips"]
        first = (flip or {}).get("first")
        flip_text = "" if flip is None else f" | flips {flip['total']}"
        if first:
            flip_text += f", first step {first['step']} layer {first['layer']} gap {first['gap']:.0e}"
            flip_text += f" logits apart {first['logits_apart']:.0e}"
        add(f"{name:30s} {r['max']:.1e} | {distances_at_steps(r['apart'])}{flip_text}")

    maxima = lambda prefix: [runs[n]["max"] for n in runs if n.startswith(prefix)]
    numbers = lambda values: " ".join(f"{v:.1e}" for v in values)
    for name in (
        "stock again",
        "tigon",
        "tigon again",
        "stock moved 0",
        "stock in halves",
    ):
        if name in runs:
            add_run(name)
    add(f"  stock moved: {numbers(maxima('stock moved '))}   tigon from moved: {numbers(maxima('tigon from'))}")
    add(f"  stock in halves from moved: {numbers(maxima('stock in halves from'))}")
    stock, ours, halves = (result["gradients"][name] for name in ("stock", "tigon", "stock in halves"))
    add("  first gradient from fp64 (worst layer): stock, tigon, stock in halves")
    for name in sorted(ours, key=lambda name: ours[name] / max(stock[name], 1e-12), reverse=True)[:7]:
        add(f"    {name:44s} {stock[name]:.1e} {ours[name]:.1e} {halves[name]:.1e}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=["llama", "qwen3", "llama4_text", "gpt_oss", "granite"])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds",
        type=int,
        default=4,
        help="number of runs from parameters that are moved by one unit in the last place",
    )
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--out", type=Path, default=Path("curves_fp32.json"))
    options = parser.parse_args()

    warnings.filterwarnings("ignore", message=".*deterministic.*")
    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    text = f"{name}, torch {torch.__version__}, fp32, lr {options.lr}, {options.steps} steps; max relative distance\n"
    results = {}
    for model_type in options.types:
        try:
            results[model_type] = measure(model_type, options)
            text += table(model_type, results[model_type]) + "\n"
        # After an error, measure the other types nevertheless.
        except Exception as error:
            traceback.print_exc()
            text += f"\n== {model_type} FAILED: {error!r}\n"
        document = {"options": {k: str(v) for k, v in vars(options).items()}, "results": results}
        options.out.write_text(json.dumps(document))
        options.out.with_suffix(".txt").write_text(text)
        print(flush=True)
    print(text)


if __name__ == "__main__":
    main()
