"""Train on very long sequences, with the inputs of layers on the host: `python examples/time_long_context.py`.

The script needs one GPU with 140 GiB and a host with 128 GiB, and takes about four minutes without the part `floor`,
which takes 100 seconds. It has three parts:

    speed     Layers of Llama-3-8B, one sequence of 131,072 tokens, full attention: the time of a step at the levels
              `checkpoint` and `checkpoint+offload`, and the memory that was measured and planned.
    memory    The shape of Mistral-7B with a sliding window of 4096, one sequence of 450,000 tokens, AdamW on the GPU:
              the peak of one step on the GPU and on the host.
    floor     Layers of Llama-3-8B, one sequence of 262,144 tokens, full attention: the time of a step at the levels
              that move the inputs of layers, with and without saved outputs of attention, and the floor of that time:
              attention once forward and once backward in each layer, and the matrix products, each timed alone.
              `--parts floor --device cpu` runs a tiny model.

The weights are random, and so are the tokens. The planned memory is that of `tigon plan`.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import tigon
from tigon.cli.plan.planner import PlanSettings, plan
from tigon.cli.presets import PRESETS

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


def make_config(preset: str, **changes: Any) -> Any:
    """Return the config of a preset with some changes."""
    options = dict(PRESETS[preset]) | changes
    return AutoConfig.for_model(options.pop("model_type"), **options, use_cache=False)


def make_model(preset: str, level: str, attention: str, device: str = "cuda", **changes: Any) -> tuple[nn.Module, Any]:
    """Return a patched model with random weights on the device, and its config."""
    config = make_config(preset, **changes)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
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
    inputs = model.model.layers[0]._gradient_checkpointing_func.place.inputs
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


# --- the floor of a step ---------------------------------------------------------------------------

# The model of `--device cpu`.
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
# The products are timed for this many tokens, and those of the head for a quarter of them.
CHUNK = 32768


def time_call(call: Callable[[], Any], device: str, runs: int) -> float:
    """Return the seconds of the fastest of some calls."""
    seconds = []
    for _ in range(runs):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del result
    return min(seconds)


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def time_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """Return the seconds of causal attention by a backend, forward and backward."""
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    outputs: list[Tensor] = []

    def attend() -> None:
        outputs[:] = [F.scaled_dot_product_attention(q, k, v, **options)]

    with sdpa_kernel(backend):
        forward = time_call(attend, q.device.type, 2)
        dout = torch.randn_like(outputs[0])
        differentiate = functools.partial(torch.autograd.grad, outputs[0], (q, k, v), dout, retain_graph=True)
        return forward, time_call(differentiate, q.device.type, 2)


def time_attention(config: Any, tokens: int, device: str, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Return the seconds of causal attention, forward and backward, for each backend that takes the shape.

    The names are those of `SDPBackend`. The backend that torch chooses by itself has the name "default" too.
    """
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    q, k, v = (
        torch.randn(1, tokens, n, config.head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in heads
    )
    default = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)).name
    flops = 2 * tokens**2 * heads[0] * config.head_dim
    times: dict[str, tuple[float, float]] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            times[backend.name] = forward, backward = time_backend(backend, q, k, v)
        except RuntimeError as error:
            print(f"attention by {backend.name}: not possible ({str(error).splitlines()[0][:120]})", flush=True)
            continue
        note = ", which torch chooses" if backend.name == default else ""
        print(
            f"attention by {backend.name}{note}: forward {forward:.3f} s ({flops / forward / 1e12:.0f} TFLOP/s), "
            f"backward {backward:.3f} s ({2.5 * flops / backward / 1e12:.0f} TFLOP/s)",
            flush=True,
        )
    if default in times:
        times["default"] = times[default]
    return times


def time_linear(rows: int, columns_in: int, columns_out: int, device: str, dtype: torch.dtype) -> float:
    """Return the seconds of the three products of a linear layer: forward, and both gradients."""
    x = torch.randn(rows, columns_in, device=device, dtype=dtype)
    weight = torch.randn(columns_out, columns_in, device=device, dtype=dtype)
    dy = torch.randn(rows, columns_out, device=device, dtype=dtype)
    pairs = (x, weight.T), (dy, weight), (dy.T, x)
    for a, b in pairs:
        torch.matmul(a, b)
    return sum(time_call(functools.partial(torch.matmul, a, b), device, 5) for a, b in pairs)


def time_products(config: Any, tokens: int, device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of the products of a layer, and of the head, forward and backward, for this many tokens."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    layer = [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]
    rows, head_rows = min(CHUNK, tokens), min(CHUNK // 4, tokens)
    layer_seconds = sum(time_linear(rows, *shape, device, dtype) for shape in layer)
    head_seconds = time_linear(head_rows, hidden, config.vocab_size, device, dtype)
    return layer_seconds * tokens / rows, head_seconds * tokens / head_rows


def reserve_host(model: Any, config: Any, tokens: int) -> None:
    """Page-lock the host memory of a step, as the first step of a training does. This takes 0.3 s for each GiB."""
    inputs = model.model.layers[0]._gradient_checkpointing_func.place.inputs
    if inputs is None or inputs.pages is None:
        return
    sizes = [2 * tokens * config.hidden_size]
    if inputs.has_outputs:
        sizes += [2 * tokens * config.num_attention_heads * config.head_dim, 4 * tokens * config.num_attention_heads]
    inputs.pages.reserve(sum(map(inputs.pages.round_up, sizes)), config.num_hidden_layers - 1)


def time_step(level: str, layers: int, tokens: int, device: str, changes: dict) -> dict:
    """Return a row with the seconds of a step at a level."""
    model, config = make_model("Llama-3-8B", level, "sdpa", device, num_hidden_layers=layers, **changes)
    ids = torch.randint(3, config.vocab_size, (1, tokens), device=device)
    # A short step compiles the kernels.
    take_step(model, ids[:, : min(4096, tokens)], None)
    reserve_host(model, config, tokens)
    free_memory(device)
    losses: list[float] = []
    seconds = time_call(lambda: losses.append(take_step(model, ids, None)), device, 1)
    return {
        "level": level, "layers": layers, "tokens": tokens, "seconds": seconds, "loss": losses[0],
        "host GiB": host_gib(model),
        "GPU GiB": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0,
    }  # fmt: skip


def measure_floor(layers: int, tokens: int, device: str, limit: float) -> list[dict]:
    """Time a step at each level and the floor of its time, and print their ratios.

    No new step begins after `limit` seconds.
    """
    start = time.perf_counter()
    changes = TINY if device == "cpu" else {}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = make_config("Llama-3-8B", num_hidden_layers=layers, **changes)
    rows: list[dict] = []
    attention = time_attention(config, tokens, device, dtype)
    free_memory(device)
    layer_products, head_products = time_products(config, tokens, device, dtype)
    free_memory(device)
    forward, backward = attention.get("default") or min(attention.values(), key=sum)
    floor = layers * (forward + backward + layer_products) + head_products
    print(
        f"floor of {layers} layers and {tokens:,} tokens: {floor:.3f} s = {layers} x (attention {forward:.3f} + "
        f"{backward:.3f}, products {layer_products:.3f}) + head {head_products:.3f}",
        flush=True,
    )
    rows.append({"floor": floor, "attention": attention, "layer": layer_products, "head": head_products})
    moved = f"+offload:{layers - 1}"
    for level in (f"checkpoint{moved}", f"checkpoint+attention{moved}", "checkpoint+attention"):
        elapsed = time.perf_counter() - start
        if elapsed > limit:
            print(f"{level}: left out, because {elapsed:.0f} s have passed (--limit)", flush=True)
            continue
        try:
            row = time_step(level, layers, tokens, device, changes)
        except Exception as error:
            print(f"{level}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            free_memory(device)
        row["ratio"] = row["seconds"] / floor
        rows.append(row)
        print(
            f"{level:32} {row['seconds']:8.3f} s  {row['ratio']:.3f} x floor  GPU {row['GPU GiB']:6.1f} GiB  "
            f"host {row['host GiB']:5.1f} GiB  loss {row['loss']:.6f}  ({time.perf_counter() - start:.0f} s passed)",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("speed", "memory", "floor"), default=["speed", "memory"])
    parser.add_argument("--layers", type=int, default=4, help="the layers of Llama-3-8B in `speed` and `floor`")
    parser.add_argument("--tokens", type=int, default=450_000, help="the length of the sequence in the part `memory`")
    parser.add_argument("--level", default="checkpoint+offload", help="the level of the part `memory`")
    parser.add_argument("--steps", type=int, default=2, help="the timed steps of the part `speed`")
    parser.add_argument(
        "--floor-tokens", type=int, help="the length of the sequence in `floor` (262,144; 512 on a CPU)"
    )
    parser.add_argument("--limit", type=float, default=72.0, help="no step of `floor` begins after this many seconds")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="`cpu`: a tiny model, only in `floor`"
    )
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
    if "floor" in arguments.parts:
        tokens = arguments.floor_tokens or (512 if arguments.device == "cpu" else 262144)
        rows += measure_floor(arguments.layers, tokens, arguments.device, arguments.limit)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "long_context.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
