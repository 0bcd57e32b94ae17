"""Train on very long sequences, with the inputs of layers on the host: `python examples/time_long_context.py`.

The script needs one GPU with 140 GiB and a host with 128 GiB, and takes about four minutes. It has two parts:

    speed     Layers of Llama-3-8B, one sequence of 131,072 tokens, full attention: the time of a step at the levels
              `checkpoint` and `checkpoint+offload`, and the memory that was measured and planned.
    memory    The shape of Mistral-7B with a sliding window of 4096, one sequence of 450,000 tokens, AdamW on the GPU:
              the peak of one step on the GPU and on the host.

The weights are random, and so are the tokens. The planned memory is that of `tigon plan`.
"""

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import tigon
from tigon.tools.plan.planner import PlanSettings, plan
from tigon.tools.presets import PRESETS

GIB = 2**30


def attend_in_window(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float = 1.0,
    sliding_window: int | None = None, **unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the causal attention of [B, heads, T, D] in a window of tokens, by torch's kernel of FlashAttention.

    `scaled_dot_product_attention` has no window: it would need a mask of T x T values, 189 GiB for 450,000 tokens.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    left = None if sliding_window is None else sliding_window - 1
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=scaling,
        window_size_left=left, window_size_right=None if left is None else 0,
    )[0]  # fmt: skip
    return out, None


AttentionInterface.register("window", attend_in_window)


def make_model(preset: str, level: str, attention: str, **changes: Any) -> tuple[nn.Module, Any]:
    """Return a patched model with random weights on the GPU, and its config."""
    options = dict(PRESETS[preset]) | changes
    config = AutoConfig.for_model(options.pop("model_type"), **options, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    model.train()
    tigon.patch(model, memory=level)
    return model, config


def planned_gib(config: Any, level: str, tokens: int, optimizer: str) -> tuple[float, float]:
    """Return the GiB of the GPU and of the host that `tigon plan` expects for a step."""
    # A kernel with a window needs as much memory as one without.
    if getattr(config, "sliding_window", None) is not None:
        config = type(config)(**config.to_dict() | {"sliding_window": None})
    settings = PlanSettings(seq=tokens, optimizer=optimizer)
    (level_plan,) = plan(config, settings, levels=(level,), search=False)
    assert level_plan.step is not None, level_plan.reason
    return level_plan.step.peak / GIB, level_plan.step.host / GIB


def host_gib(model: Any) -> float:
    """Return the GiB of the pool of pinned memory."""
    inputs = model.model.layers[0]._gradient_checkpointing_func.inputs
    return 0.0 if inputs is None or inputs.pages is None else inputs.pages.capacity / GIB


def take_step(model: Any, tokens: Tensor, optimizer: torch.optim.Optimizer | None) -> float:
    """Take a step and return its loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss.item()


def measure(preset: str, level: str, attention: str, length: int, steps: int, optimizer: str, **changes: Any) -> dict:
    """Time steps after a warm-up, and print a line."""
    model, config = make_model(preset, level, attention, **changes)
    adamw = tigon.AdamW(model.parameters(), lr=1e-5, fused=True) if optimizer == "adamw" else None
    tokens = torch.randint(3, config.vocab_size, (1, length), device="cuda")
    # The state of the optimizer is allocated in the first step, which may be short.
    start = time.perf_counter()
    take_step(model, tokens[:, : 4096 if steps == 1 else length], adamw)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = take_step(model, tokens, adamw)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    row = {
        "model": preset, "layers": config.num_hidden_layers, "level": level, "tokens": length, "loss": loss,
        "seconds": statistics.median(seconds), "all seconds": seconds, "first step": first,
        "GPU GiB": torch.cuda.max_memory_allocated() / GIB, "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
        "host GiB": host_gib(model),
    }  # fmt: skip
    del model, adamw, tokens
    gc.collect()
    torch.cuda.empty_cache()
    row["planned GPU GiB"], row["planned host GiB"] = planned_gib(config, level, length, optimizer)
    print(
        f"{preset:11} {row['layers']:3} layers  {length:8,} tokens  {level:22} {row['seconds']:8.2f} s  "
        f"GPU {row['GPU GiB']:6.1f} GiB (plan {row['planned GPU GiB']:6.1f}, reserved {row['reserved GiB']:6.1f})  "
        f"host {row['host GiB']:5.1f} GiB (plan {row['planned host GiB']:5.1f})  loss {loss:.4f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("speed", "memory"), default=["speed", "memory"])
    parser.add_argument("--layers", type=int, default=4, help="the layers of Llama-3-8B in the part `speed`")
    parser.add_argument("--tokens", type=int, default=450_000, help="the length of the sequence in the part `memory`")
    parser.add_argument("--level", default="checkpoint+offload", help="the level of the part `memory`")
    parser.add_argument("--steps", type=int, default=2, help="the timed steps of the part `speed`")
    arguments = parser.parse_args()
    rows = []
    if "speed" in arguments.parts:
        moved = f"checkpoint+offload:{arguments.layers - 1}"
        for level in ("checkpoint", moved, "checkpoint"):
            changes = {"num_hidden_layers": arguments.layers}
            rows.append(measure("Llama-3-8B", level, "sdpa", 131072, arguments.steps, "none", **changes))
        ratio = rows[1]["seconds"] / min(rows[0]["seconds"], rows[2]["seconds"])
        print(f"checkpoint+offload takes {ratio:.3f} times as long as checkpoint, and the losses are equal: "
              f"{rows[0]['loss'] == rows[1]['loss']}", flush=True)  # fmt: skip
    if "memory" in arguments.parts:
        rows.append(measure("Mistral-7B", arguments.level, "window", arguments.tokens, 1, "adamw",
                            sliding_window=4096))  # fmt: skip
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "long_context.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
