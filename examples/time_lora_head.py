"""Time the loss of a frozen head with and without an adapter on it: `python examples/time_lora_head.py` (one GPU).

Each of 15 rounds times four calls forward + backward without the adapter, and then four calls with it. The script
prints the medians, the median of the ratios of the rounds with its range, and the peaks of memory above the inputs.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from timing import mean_milliseconds
from torch import Tensor

import tigon
from tigon.ops.adapters.lora import adapter_hidden
from tigon.ops.adapters.projection import Adapter

SCALING = 2.0
CALLS = 4
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    t, h, v, r = arguments.tokens, arguments.hidden, arguments.vocabulary, arguments.rank
    torch.manual_seed(0)
    x = torch.randn(t, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, h, device="cuda", dtype=torch.bfloat16) * h**-0.5
    # PEFT holds adapters in fp32.
    a = (torch.randn(r, h, device="cuda") * h**-0.5).requires_grad_()
    b = (torch.randn(v, r, device="cuda") * 0.02).requires_grad_()
    target = torch.randint(v, (t,), device="cuda")

    def frozen() -> Tensor:
        return tigon.linear_cross_entropy(x, weight, target)

    def adapted() -> Tensor:
        (low_rank_hidden,) = adapter_hidden(x, [Adapter(a, b, SCALING)])
        return tigon.linear_cross_entropy(x, weight, target, low_rank=(SCALING * low_rank_hidden, b))

    def step(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        for leaf in (x, a, b):
            leaf.grad = None

    def milliseconds(loss: Callable[[], Tensor]) -> float:
        return mean_milliseconds(lambda: step(loss), CALLS)

    def peak_gib(loss: Callable[[], Tensor]) -> float:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss)
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    for loss in (frozen, adapted):
        milliseconds(loss)
    rounds = [(milliseconds(frozen), milliseconds(adapted)) for _ in range(ROUNDS)]
    ratios = [with_adapter / without for without, with_adapter in rounds]
    for loss, times in zip((frozen, adapted), zip(*rounds, strict=True), strict=True):
        print(f"{loss.__name__:8} {statistics.median(times):6.2f} ms, peak {peak_gib(loss):.2f} GiB above the inputs")
    print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
