"""Time one step of torch's fused AdamW and of Tigon's: `python examples/time_adamw.py`.

The script needs one GPU with 80 GiB, or less with a smaller `--model`.

The device has the parameters of the model in bf16, their gradients and their moments. GB/s counts 14 bytes for each
parameter, which a step must move at least. Host is the time until the call returns. Each line is the median of ten
steps, after two steps that are not timed.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

import tigon

# Hidden size, size of the MLP, layers, width of the keys. Both have a vocabulary of 128256; the smaller one uses the
# matrix of its embedding as the head.
MODELS = {"Llama-3-8B": (4096, 14336, 32, 1024), "Llama-3.2-1B": (2048, 8192, 16, 512)}
OPTIONS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parameter_shapes(model: str) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters."""
    h, i, layers, kv = MODELS[model]
    layer = [(h, h), (kv, h), (kv, h), (h, h), (i, h), (i, h), (h, i), (h,), (h,)]
    ends = [(128256, h)] * (2 if model == "Llama-3-8B" else 1)
    return [*ends, *layer * layers, (h,)]


def measure(name: str, step: Callable[[], object], parameters: int) -> None:
    """Time a step and print a line."""
    device, host = [], []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start_time = time.perf_counter()
        start.record()
        step()
        end.record()
        host.append((time.perf_counter() - start_time) * 1e3)
        end.synchronize()
        device.append(start.elapsed_time(end))
    ms = statistics.median(device[2:])
    print(f"{name:36} {ms:8.2f} ms {14 * parameters / ms / 1e6:6.0f} GB/s   host {statistics.median(host[2:]):5.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="Llama-3-8B")
    model = parser.parse_args().model
    params = [
        torch.nn.Parameter(torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02) for s in parameter_shapes(model)
    ]
    # There are two sets of gradients, because in training they are not always at the same addresses.
    gradients = [[torch.randn_like(p) * 1e-2 for p in params] for _ in range(2)]
    sets = itertools.cycle(gradients)
    count = sum(p.numel() for p in params)
    print(f"{model}: {len(params)} tensors, {count / 1e9:.2f}e9 parameters; {torch.cuda.get_device_name()}")

    def set_gradients() -> None:
        for p, g in zip(params, next(sets), strict=True):
            p.grad = g

    set_gradients()
    stock = torch.optim.AdamW(params, fused=True, **OPTIONS)
    measure("torch.optim.AdamW(fused=True)", stock.step, count)
    ours = tigon.AdamW(params, fused=True, **OPTIONS)
    ours.state = stock.state
    measure("tigon.AdamW(fused=True)", ours.step, count)
    measure("the same, other gradient addresses", lambda: (set_gradients(), ours.step()), count)
    # By default the counts of steps are on the host.
    ours = tigon.AdamW(params, **OPTIONS)
    for p in params:
        ours.state[p] = stock.state[p] | {"step": torch.tensor(2.0)}
    measure("tigon.AdamW()", ours.step, count)


if __name__ == "__main__":
    main()
