"""Time and check the FP8 ops at the layer of Llama-3-8B: `python examples/time_fp8.py` (one GPU with FP8 units).

The tables are:

    products    the nine products of the layer alone, forward + dX + dW, in bf16 and as bare FP8 products
    layer       the query, key and value projections, the output projection and the gated MLP, forward + backward, in
                bf16 and in FP8 with both recipes. Each call quantises the weights, as the one micro-batch of a step
                does; "cached" is a further micro-batch of the same step.
    passes      each pass that only exists for FP8, with its bandwidth: bytes that must move, over the time
    tiles       the same passes with other tiles (--tiles)
    errors      relative errors of y, dx and dW against fp32, on activations with outliers, for each recipe

A case that fails prints its error, and the script goes on. All numbers are also written to `$OUT/time_fp8.json`. The
script takes about two minutes.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import attempt, milliseconds, results
from torch import Tensor, nn

import tigon
from tigon.ops.fp8.formats import RECIPES, Factor
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.gated_gradients import GatedNeeds, gated_gradients
from tigon.ops.fp8.products import multiply_fp8
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_gated
from tigon.ops.fp8.quantisation_kernels import Fp8TileConfig
from tigon.ops.fp8.weights import WeightCache
from tigon.ops.mlps.projections import linears
from tigon.runtime.tuning import tuned

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
HIDDEN, KEY, INNER = 4096, 1024, 14336
# inputs and outputs of the seven projections
SHAPES = {
    "q": (HIDDEN, HIDDEN), "k": (HIDDEN, KEY), "v": (HIDDEN, KEY), "o": (HIDDEN, HIDDEN),
    "gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN),
}  # fmt: skip


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).mul_(scale)


# --- products --------------------------------------------------------------------------------------


def time_products(tokens: int) -> None:
    print(f"products, {tokens} tokens: ms for forward, dX, dW and their sum over the layer")

    def total(name: str, run: Callable[[int, int, int], tuple[float, float, float]]) -> None:
        def line() -> str:
            rows = [run(tokens, inputs, outputs) for inputs, outputs in SHAPES.values()]
            sums = [sum(column) for column in zip(*rows, strict=True)]
            results.setdefault("products", {})[name] = {"sums": sums, "rows": dict(zip(SHAPES, rows, strict=True))}
            return f"{sums[0]:6.2f} {sums[1]:6.2f} {sums[2]:6.2f}   {sum(sums):6.2f}"

        attempt("products", name, line)

    def bf16(t: int, i: int, o: int) -> tuple[float, float, float]:
        x, weight, dy = randn(t, i), randn(o, i, scale=i**-0.5), randn(t, o)
        return (
            milliseconds(lambda: x @ weight.t(), 5, 3), milliseconds(lambda: dy @ weight, 5, 3),
            milliseconds(lambda: dy.t() @ x, 5, 3),
        )  # fmt: skip

    def fp8(recipe: str, is_fast: bool) -> Callable[[int, int, int], tuple[float, float, float]]:
        def factor(rows: int, columns: int) -> Factor:
            scale = torch.ones((rows, 1) if recipe == "rowwise" else 1, device="cuda")
            return Factor(randn(rows, columns).to(E4M3), scale)

        def run(t: int, i: int, o: int) -> tuple[float, float, float]:
            x, weight = factor(t, i), factor(o, i)
            dy, weight_transposed = factor(t, o), factor(i, o)
            dy_transposed, x_transposed = factor(o, t), factor(i, t)
            pairs = ((x, weight), (dy, weight_transposed), (dy_transposed, x_transposed))
            times = [milliseconds(lambda a=a, b=b: multiply_fp8(a, b, BF16, is_fast=is_fast), 5, 3) for a, b in pairs]
            return times[0], times[1], times[2]

        return run

    total("bf16", bf16)
    for recipe in RECIPES:
        for is_fast in (True, False):
            total(f"{recipe}, {'fast' if is_fast else 'precise'} sums", fp8(recipe, is_fast))


# --- the layer -------------------------------------------------------------------------------------


def time_layer(tokens: int) -> None:
    print(f"layer, {tokens} tokens: ms forward + backward of qkv, o, MLP and all; peak GiB of the MLP above its inputs")
    layers = [nn.Linear(HIDDEN, o, bias=False, device="cuda", dtype=BF16) for o in (HIDDEN, KEY, KEY)]
    output = nn.Linear(HIDDEN, HIDDEN, bias=False, device="cuda", dtype=BF16)
    gate, up, down = (randn(o, i, scale=i**-0.5).requires_grad_() for i, o in list(SHAPES.values())[4:])
    x = randn(tokens, HIDDEN).requires_grad_()
    qkv_weights = [layer.weight for layer in layers]
    leaves = [x, *qkv_weights, output.weight, gate, up, down]
    upstream = [randn(tokens, o) for o in (HIDDEN, KEY, KEY)]
    dy = randn(tokens, HIDDEN)

    def step(run: Callable[[], Any], upstream: Any) -> Callable[[], None]:
        def call() -> None:
            torch.autograd.backward(run(), upstream)
            for leaf in leaves:
                leaf.grad = None

        return call

    def line(name: str, steps: list[Callable[[], None]]) -> str:
        times = [milliseconds(step) for step in steps]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[2]()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        results.setdefault("layer", {})[name] = {"qkv": times[0], "o": times[1], "mlp": times[2], "peak GiB": peak}
        return " ".join(f"{t:6.2f}" for t in (*times, sum(times))) + f"   {peak:5.2f} GiB"

    def bf16() -> list[Callable[[], None]]:
        runs = (lambda: linears(x, layers), lambda: output(x), lambda: tigon.glu_mlp(x, gate, up, down))
        return [step(run, grad) for run, grad in zip(runs, (upstream, dy, dy), strict=True)]

    def fp8(recipe: str, fp8_dw: bool, is_cached: bool) -> list[Callable[[], None]]:
        options: dict[str, Any] = {"recipe": recipe, "fp8_dw": fp8_dw}
        caches = [WeightCache() for _ in range(3)]

        def cache(i: int) -> WeightCache:
            if not is_cached:
                caches[i].clear()
            return caches[i]

        runs = (
            lambda: fp8_projections(x, qkv_weights, [None] * 3, **options, caches=cache(0)),
            lambda: fp8_projections(x, [output.weight], [None], **options, caches=cache(1)),
            lambda: fp8_glu_mlp(x, gate, up, down, **options, caches=cache(2)),
        )
        return [step(run, grad) for run, grad in zip(runs, (upstream, dy, dy), strict=True)]

    attempt("layer", "bf16", lambda: line("bf16", bf16()))
    for recipe in RECIPES:
        for fp8_dw in (True, False):
            for is_cached in (False, True):
                name = f"{recipe}, dW in {'FP8' if fp8_dw else 'bf16'}{', cached' if is_cached else ''}"
                attempt("layer", name, lambda name=name, args=(recipe, fp8_dw, is_cached): line(name, fp8(*args)))


# --- passes ----------------------------------------------------------------------------------------


def passes(tokens: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return each pass of the ops and the bytes that it must move."""
    x, weight = randn(tokens, HIDDEN), randn(HIDDEN, HIDDEN)
    dys = [randn(tokens, o) for o in (HIDDEN, KEY, KEY)]
    gate, up, da = (randn(tokens, INNER) for _ in range(3))
    wide = [randn(INNER, HIDDEN) for _ in range(2)]
    n, inner = x.numel(), gate.numel()
    cases: dict[str, tuple[Callable[[], Any], int]] = {}
    for recipe in RECIPES:
        r = recipe == "rowwise"
        one_pass = 2 if r else 4
        quantised = lambda parts, rows, transposed, by_columns=False, r=r: quantise(
            parts, Layout(r, rows, transposed, by_columns)
        )
        gradients = lambda *needs, r=r: gated_gradients(da, gate, up, "silu", GatedNeeds(r, *needs))
        cases |= {
            f"{recipe}: x, both copies": (lambda q=quantised: q([x], True, True), 6 * n),
            f"{recipe}: x, by rows": (lambda q=quantised: q([x], True, False), (one_pass + 1) * n),
            f"{recipe}: x, transposed": (lambda q=quantised: q([x], False, True), 5 * n),
            f"{recipe}: dq, dk and dv, both copies": (
                lambda q=quantised: q(dys, True, True, True), 6 * sum(dy.numel() for dy in dys)
            ),
            f"{recipe}: weight of q, both copies": (lambda q=quantised: q([weight], True, True), 6 * weight.numel()),
            f"{recipe}: weights of gate and up, both": (lambda q=quantised: q(wide, True, True), 12 * wide[0].numel()),
            f"{recipe}: act(gate) up by rows": (
                lambda r=r: quantise_gated(gate, up, "silu", Layout(r, True, False)), (2 * one_pass + 1) * inner
            ),
            f"{recipe}: dgate, dup and a, all copies": (lambda g=gradients: g(True, True, True), 17 * inner),
            f"{recipe}: dgate and dup by rows": (lambda g=gradients: g(True, False, False), 14 * inner),
        }  # fmt: skip
    return cases


def time_passes(tokens: int) -> None:
    print(f"passes, {tokens} tokens: ms, GB/s of the bytes that must move")
    source = randn(tokens, INNER)
    target = torch.empty_like(source)

    def line(name: str, run: Callable[[], Any], nbytes: int) -> str:
        time = milliseconds(run)
        results.setdefault("passes", {})[name] = {"ms": time, "GB/s": nbytes / time / 1e6}
        return f"{time:7.4f} {nbytes / time / 1e6:7.0f}"

    cases = {"a copy": (lambda: target.copy_(source), 4 * source.numel())} | passes(tokens)
    for name, (run, nbytes) in cases.items():
        attempt("passes", name, lambda name=name, run=run, nbytes=nbytes: line(name, run, nbytes))


def time_tiles(tokens: int) -> None:
    print(f"tiles, {tokens} tokens: ms of passes with other tiles (rows x columns, warps), the same for both passes")
    tiles = [
        (128, 64, 8), (128, 64, 4), (64, 64, 4), (64, 64, 8), (128, 32, 4), (128, 32, 8), (64, 128, 8), (32, 128, 4),
        (128, 128, 8), (256, 32, 8),
    ]  # fmt: skip
    names = (
        "tensorwise: x, both copies", "rowwise: x, both copies", "tensorwise: act(gate) up by rows",
        "tensorwise: dgate, dup and a, all copies", "rowwise: dgate, dup and a, all copies",
    )  # fmt: skip
    cases = passes(tokens)
    for name in names:
        for tile in tiles:
            label = f"{name[:30]} {tile[0]}x{tile[1]}, {tile[2]}"

            def line(label: str = label, name: str = name, tile: tuple[int, int, int] = tile) -> str:
                with tuned(Fp8TileConfig, block_m=tile[0], block_k=tile[1], num_warps=tile[2]):
                    time = milliseconds(cases[name][0], 3, 5)
                results.setdefault("tiles", {})[label] = time
                return f"{time:7.4f}"

            attempt("tiles", label, line)


# --- errors ----------------------------------------------------------------------------------------


def relative_errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(actual, exact, strict=True)]


def print_errors(tokens: int) -> None:
    print(f"errors, {tokens} tokens, in %: a layer 4096 x 4096 (y, dx, dW), then the MLP (y, dx, dG, dU, dD)")
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(0)

    def outliers(*shape: int, rows: float, columns: float) -> Tensor:
        """Return normal values, with lognormal scales of rows and of columns."""
        draw = lambda *sizes: torch.randn(sizes, device="cuda", generator=generator)
        return draw(*shape) * draw(shape[0], 1).mul(rows).exp() * draw(1, shape[1]).mul(columns).exp()

    x = outliers(tokens, HIDDEN, rows=0.3, columns=1.0).to(BF16).requires_grad_()
    dy = outliers(tokens, HIDDEN, rows=1.0, columns=0.5).mul(1e-5).to(BF16)
    weight = randn(HIDDEN, HIDDEN, scale=HIDDEN**-0.5).requires_grad_()
    gate, up, down = (randn(o, i, scale=i**-0.5).requires_grad_() for i, o in list(SHAPES.values())[4:])

    def step(run: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
        y = run(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    wide = lambda tensors: [t.detach().float().requires_grad_() for t in tensors]
    layer, mlp = [x, weight], [x, gate, up, down]
    exact_layer = step(F.linear, wide(layer), dy.float())
    exact_mlp = step(lambda x, g, u, d: (F.silu(x @ g.t()) * (x @ u.t())) @ d.t(), wide(mlp), dy.float())

    def line(name: str, run_layer: Callable[..., Tensor], run_mlp: Callable[..., Tensor]) -> str:
        errors = relative_errors(step(run_layer, layer, dy), exact_layer)
        mlp_errors = relative_errors(step(run_mlp, mlp, dy), exact_mlp)
        results.setdefault("errors", {})[name] = {"layer": errors, "mlp": mlp_errors}
        return "  ".join(" ".join(f"{100 * e:6.2f}" for e in row) for row in (errors, mlp_errors))

    attempt("errors", "bf16", lambda: line("bf16", F.linear, tigon.glu_mlp))
    for recipe in RECIPES:
        run_layer = lambda x, w, r=recipe: tigon.fp8_linear(x, w, recipe=r)
        run_mlp = lambda x, g, u, d, r=recipe: fp8_glu_mlp(x, g, u, d, recipe=r)
        attempt("errors", recipe, lambda n=recipe, a=run_layer, b=run_mlp: line(n, a, b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tiles", action="store_true", help="also time the passes with other tiles")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print_errors(2048)
    time_products(arguments.tokens)
    time_layer(arguments.tokens)
    time_passes(arguments.tokens)
    if arguments.tiles:
        time_tiles(arguments.tokens)
    folder = Path(os.environ.get("OUT", "."))
    (folder / "time_fp8.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
