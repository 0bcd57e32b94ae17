"""Show what quantisation costs in a step of Llama-3-8B in FP8: `python examples/profile_fp8.py` (one H200).

The tables are:

    steps     the milliseconds of a training step, in bf16 and for each recipe
    kernels   the milliseconds of the GPU in a step, by kind of kernel, and the kernels of the quantisation one by one

"only for FP8" is the time of the quantisation, and the time of the norms, the gated activations and the fills beyond
that of the step in bf16, because the quantisation replaces the gated activations.
A case that fails prints its error, and the script goes on. It writes all numbers to `$OUT/profile_fp8.json`, and takes
about 60 seconds and 90 GiB. With `--layers 8` it takes a third of both.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import attempt, results
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tigon
from tigon.ops.fp8.formats import RECIPES

BF16 = torch.bfloat16
HIDDEN = 4096

# The kinds of kernels that differ between bf16 and FP8 because of the quantisation.
OF_QUANTISATION = ("quantisation", "norms and gates", "fills and copies")

# The kind of a kernel is the first one with a part of its name.
KINDS = {
    "quantisation": ("amax_kernel", "write_kernel", "row_kernel"),
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas"),
    # The kernels of the norms and of the gated activations have the same names.
    "norms and gates": ("_forward_kernel", "_backward_kernel", "_sum_kernel"),
    "optimizer": ("adam", "multi_tensor"),
    "fills and copies": ("fill", "memset", "memcpy", "copy"),
}


# --- steps -----------------------------------------------------------------------------------------


def make_model(layers: int, tokens: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=HIDDEN, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=tokens, rope_theta=500000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).train()


def kernels_of(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Return the milliseconds and the calls of each kernel in a call of `run`."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total]
    return {event.key: (event.self_device_time_total / 1e3, event.count) for event in events}


def kind_of(kernel: str) -> str:
    parts = ((kind, part) for kind, names in KINDS.items() for part in names)
    return next((kind for kind, part in parts if part in kernel.lower()), "others")


def time_steps(layers: int, batch: int, seq: int) -> None:
    print(f"steps, {layers} layers, {batch} x {seq}: ms, peak GiB, loss; then ms of the GPU by kind of kernel")
    model = make_model(layers, seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(0, 128256, (batch, seq), device="cuda")

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def line(name: str) -> str:
        for _ in range(3):
            step()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            loss = step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated() / 2**30
        kernels = kernels_of(step)
        kinds = dict.fromkeys([*KINDS, "others"], 0.0)
        for kernel, (milliseconds, _) in kernels.items():
            kinds[kind_of(kernel)] += milliseconds
        median = statistics.median(times)
        results.setdefault("steps", {})[name] = {
            "ms": times, "peak GiB": peak, "loss": loss.item(), "kinds": kinds, "kernels": kernels
        }  # fmt: skip
        lines = [f"{median:7.1f} ms {peak:6.1f} GiB   {loss.item():.6f}   GPU {sum(kinds.values()):7.1f} ms"]
        lines.append("    " + "; ".join(f"{kind} {t:.1f}" for kind, t in kinds.items()))
        before = results["steps"].get("bf16", {}).get("kinds")
        if before and kinds["quantisation"]:
            only = sum(kinds[kind] - before[kind] for kind in OF_QUANTISATION)
            lines.append(f"    only for FP8: {only:.1f} ms, {100 * only / median:.1f} % of the step")
            for kernel, (milliseconds, count) in sorted(kernels.items(), key=lambda item: -item[1][0]):
                if kind_of(kernel) == "quantisation":
                    lines.append(f"      {kernel[:40]:40} {milliseconds:7.2f} ms {count:5} calls")
        return "\n".join(lines)

    def run(name: str, **options: Any) -> None:
        report = tigon.patch(model, **options)
        attempt("steps", name, lambda: line(name))
        report.restore()

    run("bf16")
    for recipe in RECIPES:
        run(recipe, fp8=recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    attempt("steps", "all", lambda: time_steps(arguments.layers, arguments.batch, arguments.seq) or "done")
    folder = Path(os.environ.get("OUT", "."))
    (folder / "profile_fp8.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
