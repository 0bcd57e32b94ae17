"""Time and check experts in FP8 beside `tigon.moe_mlp`: `python examples/time_fp8_experts.py` (one GPU of Hopper).

For each model and number of tokens:

    op          forward + backward with all gradients, TFLOP/s of the six products (four if frozen), and the peak above
                inputs and gradients. In FP8 each call quantises the weights, as the only micro-batch of a step does;
                "cached" is a further micro-batch; "frozen" has no gradients of the weights.
    products    each grouped product alone, in bf16 and in FP8
    passes      each pass that only exists for FP8 or replaces one in bf16, with its bandwidth: bytes over the time. The
                transposed copy reads its weight twice; the bandwidth counts one read (3 bytes for each value).
    errors      relative errors of y and all gradients against fp32, for 2048 tokens

A case that fails prints its error, and the script goes on. All numbers are also written to
`$OUT/time_fp8_experts.json`. Without a GPU, tiny experts show that the script runs.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from timing import attempt, milliseconds, results
from torch import Tensor

import tigon
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.choice_order import route
from tigon.ops.experts.fp8_products import quantise_activated, quantise_rows
from tigon.ops.experts.fp8_rows import quantise_and_spread
from tigon.ops.experts.grouped_linear import grouped_product, grouped_weight_gradient
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8, moe_mlp_reference
from tigon.ops.experts.routing import spread
from tigon.ops.fp8 import stacks
from tigon.ops.fp8.products import multiply_groups
from tigon.ops.fp8.stacks import quantise_stack
from tigon.ops.fp8.weights import WeightCache
from tigon.ops.mlps.glu import ClampedGate

HAS_GPU = torch.cuda.is_available()
DEVICE, BF16 = "cuda" if HAS_GPU else "cpu", torch.bfloat16


class Experts(NamedTuple):
    """The sizes of a mixture."""

    hidden: int
    experts: int
    inner: int
    choices: int
    # GPT-OSS has weights [E, in, out] and an activation that autograd differentiates.
    is_gpt_oss: bool = False


MODELS = {
    "Qwen3-30B-A3B": Experts(2048, 128, 768, 8),
    "gpt-oss-20b": Experts(2880, 32, 2880, 4, True),
    "Mixtral-8x7B": Experts(4096, 8, 14336, 2),
}
if not HAS_GPU:
    MODELS = {name: Experts(64, 4, 48, 2, each.is_gpt_oss) for name, each in MODELS.items()}


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16).mul_(scale)


class Case:
    """The inputs of one mixture and number of tokens."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens, self.sizes = f"{name}, {tokens:,} tokens", tokens, MODELS[name]
        hidden, experts, inner, choices, self.transposed = self.sizes
        self.x = randn(tokens, hidden)
        self.up, self.down = randn(experts, 2 * inner, hidden), randn(experts, hidden, inner)
        self.up *= hidden**-0.5
        self.down *= inner**-0.5
        if self.transposed:
            self.up, self.down = self.up.mT.contiguous(), self.down.mT.contiguous()
        scores = torch.randn(tokens, experts, device=DEVICE).softmax(-1)
        self.weights, self.index = scores.topk(choices)
        self.weights /= self.weights.sum(-1, keepdim=True)
        self.dy = randn(tokens, hidden)
        self.activation: Any = ClampedGate(7.0, 1.702, 1.0, True) if self.transposed else "silu"
        self.leaves = [self.x, self.up, self.down, self.weights]

    def options(self) -> dict[str, Any]:
        return {"transposed": self.transposed, "activation": self.activation}

    def bf16(self, x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        return tigon.moe_mlp(x, up, down, self.index, weights, **self.options())

    def fp8(self, x: Tensor, up: Tensor, down: Tensor, weights: Tensor, cache: WeightCache | None = None) -> Tensor:
        parameters = ExpertParameters(up, down, None, None)
        return moe_mlp_in_fp8(x, parameters, self.index, weights, cache=cache, **self.options())

    def exact(self, x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        activation = self.activation.reference if self.transposed else self.activation
        return moe_mlp_reference(
            x, up, down, self.index, weights, transposed=self.transposed, activation=activation
        )  # fmt: skip


# --- the op ----------------------------------------------------------------------------------------


def time_op(case: Case) -> None:
    print(f"op, {case.name}: ms, TFLOP/s, peak MiB above the inputs and gradients")
    hidden, _, inner, choices, _ = case.sizes
    product = 2 * case.tokens * choices * hidden * 3 * inner
    cache = WeightCache()

    def line(name: str, run: Callable[..., Tensor], is_frozen: bool, **options: Any) -> str:
        for leaf in case.leaves:
            leaf.requires_grad_(not (is_frozen and leaf.dim() == 3))
        needed = [leaf for leaf in case.leaves if leaf.requires_grad]
        step = lambda: torch.autograd.grad(run(*case.leaves, **options), needed, case.dy)
        duration = milliseconds(step, 5, 4)
        peak = 0.0
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients = step()
            peak = (torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)) / 2**20
            del gradients
        rate = (2 if is_frozen else 3) * product / duration / 1e9
        results.setdefault(f"op, {case.name}", {})[name] = {"ms": duration, "TFLOP/s": rate, "MiB": peak}
        return f"{duration:8.3f} {rate:7.0f} {peak:8.0f}"

    for is_frozen in (False, True):
        suffix = ", frozen" if is_frozen else ""
        cases: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
            "bf16": (case.bf16, {}), "FP8": (case.fp8, {}), "FP8, cached": (case.fp8, {"cache": cache}),
        }  # fmt: skip
        for name, (run, options) in cases.items():
            name += suffix
            attempt("op", name, lambda n=name, r=run, o=options, f=is_frozen: line(n, r, f, **o))
    cache.clear()
    for leaf in case.leaves:
        leaf.requires_grad_(False)


# --- products --------------------------------------------------------------------------------------


def time_products(case: Case) -> None:
    print(f"products, {case.name}: ms in bf16, ms in FP8 with fast sums")
    routing = route(case.index, case.sizes.experts)
    rows, ends = len(routing.order), routing.ends
    by_rows = lambda weight: (weight.mT if case.transposed else weight).contiguous()
    up, down = by_rows(case.up), by_rows(case.down)
    weights = {"h = x U^T": up, "z = a D^T": down, "da = dy D": down.mT, "dx = dh U": up.mT}
    for name, weight in weights.items():

        def line(name: str = name, weight: Tensor = weight) -> str:
            x = randn(rows, weight.shape[2])
            bf16 = milliseconds(lambda: grouped_product(x, weight.mT, ends), 5, 4)
            factor, copy = quantise_rows(x), quantise_stack(weight, True, False).rows
            assert copy is not None
            fp8 = milliseconds(lambda: multiply_groups(factor, copy, ends, BF16), 5, 4)
            results.setdefault(f"products, {case.name}", {})[name] = {"bf16": bf16, "FP8": fp8}
            return f"{bf16:8.3f} {fp8:8.3f}"

        attempt("products", name, line)
    for name, weight in {"dU, only in bf16": up, "dD, only in bf16": down}.items():

        def gradient_line(name: str = name, weight: Tensor = weight) -> str:
            dy, x = (randn(rows, size) for size in weight.shape[1:])
            bf16 = milliseconds(lambda: grouped_weight_gradient(dy, x, ends), 5, 4)
            results.setdefault(f"products, {case.name}", {})[name] = {"bf16": bf16}
            return f"{bf16:8.3f}"

        attempt("products", name, gradient_line)


# --- passes ----------------------------------------------------------------------------------------


def time_passes(case: Case, times_strips: bool) -> None:
    print(f"passes, {case.name}: ms, GB/s of the bytes that must move")
    routing = route(case.index, case.sizes.experts)
    rows = len(routing.order)
    h = randn(rows, 2 * case.sizes.inner)
    gate, up = h.chunk(2, -1)
    x, n = case.x, case.x.numel()
    spread_values, weights = rows * case.sizes.hidden, case.up.numel() + case.down.numel()

    def copies(is_transposed: bool) -> None:
        for weight in (case.up, case.down):
            quantise_stack(weight, not is_transposed, is_transposed)

    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "spread x in bf16": (lambda: spread(x, routing), 2 * n + 2 * spread_values),
        "quantise x and spread it": (lambda: quantise_and_spread(x, None, routing), 2 * n + spread_values),
        "act(gate) * up in bf16": (lambda: tigon.swiglu(gate, up), 3 * h.numel()),
        "act(gate) * up in FP8": (lambda: quantise_activated(h, "silu"), 5 * h.numel() // 2),
        "dh by rows": (lambda: quantise_rows(h), 3 * h.numel()),
        "weights by rows": (lambda: copies(False), 3 * weights),
        "weights transposed": (lambda: copies(True), 3 * weights),
    }

    def line(name: str, run: Callable[[], Any], nbytes: int) -> str:
        duration = milliseconds(run, 5, 4)
        rate = nbytes / duration / 1e6
        results.setdefault(f"passes, {case.name}", {})[name] = {"ms": duration, "GB/s": rate}
        return f"{duration:8.3f} {rate:7.0f}"

    for name, (run, nbytes) in cases.items():
        attempt("passes", name, lambda n=name, r=run, b=nbytes: line(n, r, b))
    for tile in ((128, 64, 8), (128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 128, 8), (256, 32, 8), (128, 128, 8)):
        if times_strips:
            name = f"weights transposed, {tile[0]} x {tile[1]}, {tile[2]} warps"
            with mock.patch.multiple(stacks, BLOCK_M=tile[0], BLOCK_K=tile[1], NUM_WARPS=tile[2]):
                attempt("passes", name, lambda n=name: line(n, lambda: copies(True), 3 * weights))


# --- errors ----------------------------------------------------------------------------------------


def print_errors(name: str) -> None:
    case = Case(name, 2048 if HAS_GPU else 64)
    print(f"errors, {case.name}, in %: y, dx, dU, dD, dw")
    torch.backends.cuda.matmul.allow_tf32 = False

    def step(run: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        y = run(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    exact = step(case.exact, [leaf.float() for leaf in case.leaves], case.dy.float())

    def line(name: str, run: Callable[..., Tensor]) -> str:
        pairs = zip(step(run, case.leaves, case.dy), exact, strict=True)
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]
        results.setdefault(f"errors, {case.name}", {})[name] = errors
        return " ".join(f"{100 * e:6.2f}" for e in errors)

    attempt("errors", "bf16", lambda: line("bf16", case.bf16))
    attempt("errors", "FP8", lambda: line("FP8", case.fp8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768] if HAS_GPU else [64])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tiles", action="store_true", help="also time the strips of weights with other tiles")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name() if HAS_GPU else "CPU, tiny experts", "torch", torch.__version__)
    for name in arguments.models:
        attempt("errors", name, lambda name=name: print_errors(name) or "")
        for tokens in arguments.tokens:
            case = Case(name, tokens)
            time_op(case)
            time_products(case)
            time_passes(case, arguments.tiles)
            del case
    folder = Path(os.environ.get("OUT", "."))
    (folder / "time_fp8_experts.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
