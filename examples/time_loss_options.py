"""Time each option of `linear_cross_entropy`: `python examples/time_loss_options.py` (one GPU, 16 GiB).

Each of four rounds times every option: two calls forward + backward that are not timed, then four calls between two
events. The script prints medians, and their ratios to the call without options.
"""

import statistics
import sys
from pathlib import Path

import torch
from timing import mean_milliseconds

import tigon

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ops.cases import Case

T, H, V = 8192, 4096, 128256


def main() -> None:
    tensors = Case("linear_cross_entropy", "llama-3-8b", (T, H, V)).make(torch.device("cuda")).tensors
    bias = torch.zeros(V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {
        "none": {},
        "z_loss": {"z_loss": 1e-4},
        "logit_scale": {"logit_scale": 0.7},
        "token_scaling": {"token_scaling": True},
        "weight": {"weight": torch.ones(V, device="cuda")},
        "num_items": {"num_items": float(T)},
        "return_log_probs": {"return_log_probs": True},
        "return_log_probs, return_entropy": {"return_log_probs": True, "return_entropy": True},
        "return_token_accuracy, return_predicted_tokens": {
            "return_token_accuracy": True,
            "return_predicted_tokens": True,
        },
        "label_smoothing": {"label_smoothing": 0.1},
        "softcap": {"softcap": 30.0},
        "linear_bias": {"linear_bias": bias},
    }

    def step(name: str) -> None:
        result = tigon.linear_cross_entropy(*tensors.values(), **options[name])
        (result if isinstance(result, torch.Tensor) else result.loss).backward()
        for tensor in (*tensors.values(), bias):
            tensor.grad = None

    def milliseconds(name: str) -> float:
        for _ in range(2):
            step(name)
        return mean_milliseconds(lambda: step(name), 4)

    times: dict[str, list[float]] = {name: [] for name in options}
    for _ in range(4):
        for name, samples in times.items():
            samples.append(milliseconds(name))
    plain = statistics.median(times["none"])
    for name, samples in times.items():
        median = statistics.median(samples)
        print(f"{name:48s} {median:6.2f} ms  {median / plain:.3f}")


if __name__ == "__main__":
    main()
