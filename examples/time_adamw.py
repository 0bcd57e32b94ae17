"""Time one step of torch's fused AdamW and of Tigon's, with every format of states: `python examples/time_adamw.py`.

The script needs one GPU with 140 GB, or less with `--model Llama-3.2-1B`. It runs for about one minute.

The device has the parameters of the model in bf16 and their gradients. GB/s counts what a step must move at least: it
reads parameters, gradients and states, and writes parameters and states. With clipping in torch it also reads and
writes the gradients, with clipping in Tigon it reads them twice. Host is the time until the call returns. "held" are
parameters, gradients and states. Each line is the median of ten steps, after two steps that are not timed.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tigon

# Hidden size, size of the MLP, layers, width of the keys. Both have a vocabulary of 128256; the smaller one uses the
# matrix of its embedding as the head.
MODELS = {"Llama-3-8B": (4096, 14336, 32, 1024), "Llama-3.2-1B": (2048, 8192, 16, 512), "tiny": (64, 128, 2, 32)}
OPTIONS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
FORMATS: dict[str, dict[str, Any]] = {
    "8bit, bf16+8": {"state": "8bit", "master": "bf16+8"},
    "8bit, stochastic rounding": {"state": "8bit", "stochastic_rounding": True},
    "8bit": {"state": "8bit"},
    "8bit, fp32": {"state": "8bit", "master": "fp32"},
    "bf16, bf16+8": {"state": "bf16", "master": "bf16+8"},
    "bf16, stochastic rounding": {"state": "bf16", "stochastic_rounding": True},
    "fp32, bf16+8": {"state": "fp32", "master": "bf16+8"},
    "fp32, fp32": {"state": "fp32", "master": "fp32"},
}
VOCABULARY = 128256


def parameter_shapes(model: str) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters."""
    h, i, layers, kv = MODELS[model]
    layer = [(h, h), (kv, h), (kv, h), (h, h), (i, h), (i, h), (h, i), (h,), (h,)]
    ends = [(VOCABULARY if model != "tiny" else 512, h)] * (2 if model == "Llama-3-8B" else 1)
    return [*ends, *layer * layers, (h,)]


class Timer:
    """Times steps on a device, prints a line for each, and collects the results."""

    def __init__(self, params: list[torch.nn.Parameter], device: str) -> None:
        self.params, self.device, self.results = params, device, {}
        self.nbytes = sum(p.nbytes for p in params)

    def _run(self, step: Callable[[], object], prepare: Callable[[], object]) -> tuple[float, float]:
        """Return the milliseconds of a step on the device and on the host."""
        prepare()
        if self.device == "cpu":
            start_time = time.perf_counter()
            step()
            return ((time.perf_counter() - start_time) * 1e3,) * 2
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start_time = time.perf_counter()
        start.record()
        step()
        end.record()
        host = (time.perf_counter() - start_time) * 1e3
        end.synchronize()
        return start.elapsed_time(end), host

    def time(
        self,
        name: str,
        step: Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
        passes: int = 0,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """Time a step. It passes over the gradients `passes` times more than a step without clipping does."""
        try:
            times = [self._run(step, prepare) for _ in range(12 if self.device != "cpu" else 3)][2:]
        except Exception as error:
            print(f"{name:44} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            return
        ms, host = (statistics.median(x) for x in zip(*times, strict=True))
        states = 0
        if optimizer is not None:
            values = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
            states = sum(x.nbytes for x in values)
        moved = (3 + passes) * self.nbytes + 2 * states if optimizer is not None else passes * self.nbytes
        held = (2 * self.nbytes + states) / 2**30
        line = f"{name:44} {ms:8.2f} ms {moved / ms / 1e6:6.0f} GB/s   host {host:5.2f} ms"
        if optimizer is not None:
            line += f"   states {states / 2**30:6.2f} GiB, held {held:6.2f} GiB"
        print(line, flush=True)
        self.results[name] = {"ms": ms, "host_ms": host, "moved": moved, "states": states, "held_gib": held}


def time_full_states(timer: Timer, set_gradients: Callable[[], None]) -> None:
    """Time the optimizers whose states are in bf16, as the parameters are."""
    params = timer.params

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)

    stock = torch.optim.AdamW(params, fused=True, **OPTIONS)
    timer.time("torch.optim.AdamW(fused=True)", stock.step, stock)
    timer.time("clip_grad_norm_(foreach=True)", clip, passes=3)
    timer.time("clip_grad_norm_ and torch", lambda: (clip(), stock.step()), stock, passes=3)
    on_device = tigon.AdamW(params, fused=True, **OPTIONS)
    on_device.state = stock.state
    timer.time("tigon.AdamW(fused=True)", on_device.step, on_device)
    timer.time("the same, other gradient addresses", lambda: (set_gradients(), on_device.step()), on_device)
    # By default the counts of steps are on the host.
    ours = tigon.AdamW(params, **OPTIONS)
    for p in params:
        ours.state[p] = stock.state[p] | {"step": torch.tensor(2.0)}
    timer.time("tigon.AdamW()", ours.step, ours)
    timer.time("clip_grad_norm_ and tigon.AdamW()", lambda: (clip(), ours.step()), ours, passes=3)
    clipping = tigon.AdamW(params, **OPTIONS, max_grad_norm=1.0)
    clipping.state = ours.state
    timer.time("tigon.AdamW(max_grad_norm=1.0)", clipping.step, clipping, passes=1)


def time_model(model: str, device: str) -> dict[str, dict[str, float]]:
    """Time all optimizers for the shapes of one model."""
    shapes = parameter_shapes(model)
    params = [torch.nn.Parameter(torch.randn(s, device=device, dtype=torch.bfloat16) * 0.02) for s in shapes]
    # There are two sets of gradients, because in training they are not always at the same addresses.
    gradients = [[torch.randn_like(p) * 1e-2 for p in params] for _ in range(2)]
    sets = itertools.cycle([0, 1])
    count = sum(p.numel() for p in params)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"\n{model}: {len(params)} tensors, {count / 1e9:.2f}e9 parameters; {name}", flush=True)
    timer = Timer(params, device)

    def set_gradients() -> None:
        for p, g in zip(params, gradients[next(sets)], strict=True):
            p.grad = g

    set_gradients()
    time_full_states(timer, set_gradients)
    # States in fp32 need the memory of the other set.
    for p, g in zip(params, gradients[0], strict=True):
        p.grad = g
    gradients.pop()
    for label, options in FORMATS.items():
        if device == "cuda":
            torch.cuda.empty_cache()
        optimizer = tigon.AdamW(params, **OPTIONS, **options)
        timer.time(label, optimizer.step, optimizer)
        if label == "8bit, bf16+8":
            time_clipping(timer, optimizer, options)
    return timer.results


def time_clipping(timer: Timer, optimizer: tigon.AdamW, options: dict[str, Any]) -> None:
    """Time clipping with one format."""
    params = timer.params
    clipping = tigon.AdamW(params, **OPTIONS, **options, max_grad_norm=1.0)
    clipping.state = optimizer.state
    timer.time("  and max_grad_norm", clipping.step, clipping, passes=1)
    timer.time(
        "  and clip_grad_norm_", lambda: (torch.nn.utils.clip_grad_norm_(params, 1.0), optimizer.step()), optimizer, 3
    )


# --- whole training steps --------------------------------------------------------------------------

# The options of the optimizer, and what else a training step does.
TRAININGS: dict[str, tuple[dict[str, Any], str]] = {
    "no clipping": ({}, ""),
    "clip_grad_norm_": ({}, "clip"),
    "max_grad_norm": ({"max_grad_norm": 1.0}, ""),
    "step_in_backward": ({}, "step_in_backward"),
}


def time_training(batch: int, seq: int) -> dict[str, dict[str, float]]:
    """Time training steps of Llama-3.2-1B with random weights and "8bit, bf16+8", with each way to clip."""
    from transformers import AutoModelForCausalLM

    from tigon.cli.inspect.build import find_config

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(find_config("Llama-3.2-1B"), dtype=torch.bfloat16)
    tigon.patch(model)
    ids = torch.randint(VOCABULARY, (batch, seq), device="cuda")
    params, results = list(model.parameters()), {}
    print(f"\nTraining steps of Llama-3.2-1B, {batch} x {seq} tokens, 8bit, bf16+8; {torch.cuda.get_device_name()}")
    for name, (options, extra) in TRAININGS.items():
        optimizer = tigon.AdamW(params, lr=1e-5, state="8bit", master="bf16+8", **options)
        hooks = getattr(tigon, extra)(optimizer) if extra.endswith("in_backward") else None
        times = []
        for step in range(14):
            if step == 4:
                torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            if extra == "clip":
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        if hooks is not None:
            hooks.remove()
        ms, peak = statistics.median(times[4:]), torch.cuda.max_memory_allocated() / 2**30
        print(f"{name:44} {ms:8.2f} ms   peak {peak:6.2f} GiB", flush=True)
        results[name] = {"ms": ms, "peak_gib": peak}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="*", default=["Llama-3-8B", "Llama-3.2-1B"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--train", action="store_true", help="also time training steps with each way to clip")
    arguments = parser.parse_args()
    results = {}
    for model in arguments.model:
        try:
            results[model] = time_model(model, arguments.device)
        except Exception as error:
            print(f"{model}: {type(error).__name__}: {error}")
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    if arguments.train:
        try:
            results["training"] = time_training(4, 2048)
        except Exception as error:
            print(f"training: {type(error).__name__}: {error}")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "adamw.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
