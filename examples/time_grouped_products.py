"""Time the six grouped products of experts on a Hopper GPU: by Tigon's kernels and by `grouped_mm` of torch.

    python examples/time_grouped_products.py

Tokens choose their experts at random. For each product it prints the milliseconds of both sides, which take turns, the
rate of Tigon's, whether both results have the same bits, and whether Tigon's have the same bits at each call. Without
a Hopper GPU it only says so.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.experts.tiled_products import tiled_product, tiled_weight_gradient, tiles_product

# Hidden size, experts, intermediate size, and experts of a token.
MODELS = {
    "Qwen3-30B-A3B": (2048, 128, 768, 8),
    "gpt-oss-20b": (2880, 32, 2880, 4),
    "Mixtral-8x7B": (4096, 8, 14336, 2),
}
TURNS = 2


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU."""
    from triton.testing import do_bench

    return do_bench(function, warmup=20, rep=100, return_mode="median")


class Product(NamedTuple):
    """One grouped product by both sides, and the number of its operations."""

    name: str
    tigon: Callable[[], Tensor]
    grouped_mm: Callable[[], Tensor]
    operations: int


def make_products(model: str, tokens: int) -> list[Product]:
    """Return the six products of the experts of a model, forward and backward."""
    hidden, experts, inner, choices = MODELS[model]
    rows = tokens * choices
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: torch.randn(shape, device="cuda", generator=generator).bfloat16()
    index = torch.randn(tokens, experts, device="cuda", generator=generator).topk(choices).indices
    ends = torch.bincount(index.flatten(), minlength=experts).cumsum(0).int()
    x, h, a = make(rows, hidden), make(rows, 2 * inner), make(rows, inner)
    up, down = make(experts, 2 * inner, hidden), make(experts, hidden, inner)
    if not tiles_product(x, up.mT):
        raise SystemExit("time_grouped_products.py: Tigon has no such products on this GPU; they need Hopper and Gluon")

    def product(name: str, left: Tensor, weight: Tensor, operations: int) -> Product:
        ours, theirs = tiled_product, F.grouped_mm
        return Product(name, lambda: ours(left, weight, ends), lambda: theirs(left, weight, offs=ends), operations)

    def gradient(name: str, left: Tensor, right: Tensor, operations: int) -> Product:
        ours, theirs = tiled_weight_gradient, F.grouped_mm
        return Product(name, lambda: ours(left, right, ends), lambda: theirs(left.mT, right, offs=ends), operations)

    count = 2 * rows * hidden * inner
    return [
        product("gate and up", x, up.mT, 2 * count),
        product("down", a, down.mT, count),
        product("gradient of the input of down", x, down, count),
        product("gradient of the tokens", h, up, 2 * count),
        gradient("gradient of the weight of down", x, a, count),
        gradient("gradient of that of gate and up", h, x, 2 * count),
    ]


def time_model(model: str, tokens: int) -> None:
    """Print a line for each product of a model."""
    print(f"{model}, {tokens:,} tokens: `grouped_mm`, Tigon")
    sums = [0.0, 0.0]
    for product in make_products(model, tokens):
        expected, actual = product.grouped_mm(), product.tigon()
        bits = "same bits" if torch.equal(actual, expected) else "OTHER BITS"
        repeats = "repeats" if torch.equal(actual, product.tigon()) else "DOES NOT REPEAT"
        del expected, actual
        turns = [(milliseconds(product.grouped_mm), milliseconds(product.tigon)) for _ in range(TURNS)]
        times = [min(side) for side in zip(*turns, strict=True)]
        sums = [total + time for total, time in zip(sums, times, strict=True)]
        rate = product.operations / times[1] / 1e9
        print(
            f"  {product.name:34}{times[0]:8.3f}{times[1]:8.3f} ms, {rate:4.0f} TFLOP/s, {bits}, {repeats}", flush=True
        )
    print(f"  {'all six':34}{sums[0]:8.3f}{sums[1]:8.3f} ms, {sums[0] / sums[1]:.3f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("time_grouped_products.py: there is no GPU here")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in options.models:
        time_model(name, options.tokens)


if __name__ == "__main__":
    main()
