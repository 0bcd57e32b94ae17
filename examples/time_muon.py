"""Time one step of torch's Muon and of Tigon's for the matrices of a model's layers: `python examples/time_muon.py`.

The script needs one GPU with 80 GB, or less with `--model Llama-3.2-1B`. It runs for about one minute. `--configs` adds
a minute for launch parameters of the symmetric product.

The device has the matrices in bf16 and their gradients. TFLOP/s counts the multiplications and additions that the way
of each line needs at least: the loop of torch, or the Gram form with products of which one half is computed. Parts of a
step are timed for one batch of each shape, and multiplied by the number of batches. "error" is the distance from the
same iterations in fp64, relative in the Frobenius norm. "deviation" is the root mean square of sigma^2 - 1 for the
singular values sigma of the result. It is not zero for exact iterations either.
"""

import argparse
import collections
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tigon
from tigon.ops.optim import muon
from tigon.ops.optim.muon_kernels import Matrix, apply_update, compute_momentum, table_of
from tigon.ops.optim.orthogonalise import newton_schulz_reference, orthogonalise
from tigon.ops.optim.symmetric_product import Epilogue, SymmetricConfig, symmetric_product
from tigon.runtime.device import INTERPRETED
from tigon.runtime.tuning import tuned

# Hidden size, size of the MLP, layers, width of the keys.
MODELS = {"Llama-3-8B": (4096, 14336, 32, 1024), "Llama-3.2-1B": (2048, 8192, 16, 512), "tiny": (32, 64, 2, 16)}
COEFFICIENTS = [(3.4445, -4.7750, 2.0315)] * 5
# block_m, block_n, block_k, num_warps, num_stages, programs_per_multiprocessor, group
CONFIGS = [
    (128, 256, 64, 8, 3, 1, 8), (128, 256, 64, 8, 4, 1, 8), (128, 128, 64, 8, 3, 2, 8), (128, 128, 64, 4, 3, 2, 8),
    (128, 128, 64, 8, 5, 1, 8), (256, 128, 64, 8, 3, 1, 8), (128, 256, 64, 8, 3, 1, 16), (128, 256, 64, 8, 3, 1, 4),
]  # fmt: skip


def matrix_shapes(model: str) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of all layers."""
    h, i, layers, kv = MODELS[model]
    return [(h, h), (kv, h), (kv, h), (h, h), (i, h), (i, h), (h, i)] * layers


def loop_flops(shape: tuple[int, int]) -> float:
    """Return the multiplications and additions of torch's loop."""
    m, n = sorted(shape)
    return 5 * (4.0 * m * m * n + 2.0 * m**3)


def gram_flops(shape: tuple[int, int]) -> float:
    """Return those of the Gram form with one restart and five steps."""
    m, n = sorted(shape)
    return 6.0 * m * m * n + 14.0 * m**3


def median_ms(run: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Return the median time of a call, after one that is not timed."""
    times = []
    for _ in range(repeats + 1):
        if device == "cpu":
            start_time = time.perf_counter()
            run()
            times.append((time.perf_counter() - start_time) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


class Report:
    """Prints a line for each measurement, and goes on if one fails."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def add(self, name: str, measure: Callable[[], tuple[Any, str]]) -> Any:
        try:
            value, text = measure()
        except Exception as error:
            print(f"{name:46} {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
            return None
        self.results[name] = value
        print(f"{name:46} {text}", flush=True)
        return value


# --- whole steps -----------------------------------------------------------------------------------


def time_steps(report: Report, params: list[torch.nn.Parameter], device: str) -> None:
    """Time a step of torch's optimizer and of Tigon's, and their memory."""
    shapes = [(p.shape[0], p.shape[1]) for p in params]

    def time_optimizer(optimizer: torch.optim.Optimizer, flops: float) -> tuple[Any, str]:
        optimizer.step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        ms = median_ms(optimizer.step, device, 3)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0
        text = f"{ms:8.1f} ms {flops / ms / 1e9:6.0f} TFLOP/s   workspace {peak:5.2f} GiB"
        return {"ms": ms, "flops": flops, "workspace_gib": peak}, text

    loop, gram = sum(map(loop_flops, shapes)), sum(map(gram_flops, shapes))
    print(f"floors at 780 TFLOP/s: loop of torch {loop / 780e9:.1f} ms, Gram form {gram / 780e9:.1f} ms", flush=True)
    ours = tigon.Muon(params, lr=1e-4)
    report.add("tigon.Muon", lambda: time_optimizer(ours, gram))
    if hasattr(torch.optim, "Muon"):
        stock = torch.optim.Muon(params, lr=1e-4)
        stock.state = ours.state
        report.add("torch.optim.Muon", lambda: time_optimizer(stock, loop))


def time_compiled_loop(report: Report, counts: dict[tuple[int, int], int], device: str) -> None:
    """Time torch's loop, compiled for each shape, in batches as those of Tigon."""
    compiled = torch.compile(batched_loop, dynamic=False)
    total = 0.0
    for shape, count in counts.items():
        batch = batch_size(shape, count)
        x = torch.randn(batch, *shape, device=device, dtype=torch.bfloat16)

        def measure(x: torch.Tensor = x, shape: Any = shape, count: int = count, batch: int = batch) -> tuple[Any, str]:
            ms = median_ms(lambda: compiled(x), device) * count / batch
            return ms, f"{ms:8.1f} ms {loop_flops(shape) * count / ms / 1e9:6.0f} TFLOP/s"

        total += report.add(f"compiled loop, {shape}", measure) or float("nan")
    print(f"{'compiled loop of torch, all products':46} {total:8.1f} ms", flush=True)


def batched_loop(x: torch.Tensor) -> torch.Tensor:
    """Return the polar factors of a batch by the operations of torch's loop."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


# --- parts -----------------------------------------------------------------------------------------


def batch_size(shape: tuple[int, int], count: int) -> int:
    """Return the size of the batches of `tigon.Muon`."""
    limit = max(1, muon.BATCH_BYTES // (2 * shape[0] * shape[1]))
    batches = -(-count // limit)
    return -(-count // batches)


def time_parts(report: Report, shape: tuple[int, int], count: int, device: str) -> None:
    """Time the parts of a step for the matrices of one shape."""
    batch = batch_size(shape, count)
    factor = count / batch

    def draw() -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    matrices = [Matrix(draw(), draw(), draw()) for _ in range(batch)]
    x = torch.randn(batch, *shape, device=device, dtype=torch.bfloat16)
    wide = x.mT if shape[0] > shape[1] else x
    m, n = wide.shape[1:]
    moved = 2 * shape[0] * shape[1] * count

    def passes(run: Callable[[], Any], bytes_moved: int) -> tuple[Any, str]:
        ms = median_ms(run, device) * factor
        return ms, f"{ms:8.2f} ms {bytes_moved / ms / 1e6:6.0f} GB/s"

    def multiplies(run: Callable[[], Any], flops: float) -> tuple[Any, str]:
        ms = median_ms(run, device) * factor
        return ms, f"{ms:8.2f} ms {flops * count / ms / 1e9:6.0f} TFLOP/s"

    print(f"\n{count} matrices {shape}, {batch} in a batch", flush=True)
    if device == "cuda" or INTERPRETED:
        table = table_of(matrices, None)
        scales = torch.ones(batch, device=device)
        report.add(
            f"{shape} momentum", lambda: passes(lambda: compute_momentum(matrices, 0.95, True, table), 4 * moved)
        )
        report.add(
            f"{shape} update",
            lambda: passes(lambda: apply_update(matrices, x, scales, 1e-4, 1.0, 0.1, table), 3 * moved),
        )
    squares = torch.full((batch,), float(m * n), device=device)
    report.add(
        f"{shape} orthogonalisation",
        lambda: multiplies(lambda: orthogonalise(x, squares, COEFFICIENTS, 1e-7), gram_flops(shape)),
    )
    inverse = squares.reciprocal()
    r, _ = symmetric_product(wide, wide, Epilogue(scales=inverse))
    q = r.to(torch.bfloat16)
    report.add(
        f"{shape} 2 of X X^T, one half",
        lambda: multiplies(
            lambda: [symmetric_product(wide, wide, Epilogue(scales=inverse)) for _ in "12"], 2.0 * m * m * n
        ),
    )
    report.add(
        f"{shape} 14 of R Z, one half",
        lambda: multiplies(lambda: [symmetric_product(r, r, Epilogue(1.0, 0.5, r)) for _ in range(14)], 14.0 * m**3),
    )
    report.add(
        f"{shape} 14 of R Z by cuBLAS, whole", lambda: multiplies(lambda: [r @ r for _ in range(14)], 28.0 * m**3)
    )
    report.add(
        f"{shape} 2 of Q X, cuBLAS",
        lambda: multiplies(
            lambda: [torch.bmm(q, wide) if wide is x else torch.bmm(x, q) for _ in "12"], 4.0 * m * m * n
        ),
    )


def measure_errors(report: Report, shape: tuple[int, int], device: str) -> None:
    """Measure the errors of torch's loop and of Tigon for a Gaussian matrix and an ill-conditioned one."""
    torch.manual_seed(0)
    noise = torch.randn(shape, device=device)
    scales = torch.arange(1, shape[1] + 1, device=device, dtype=torch.float32).rsqrt()
    for name, matrix in (("Gaussian", noise), ("falling", noise * scales)):
        x = matrix.bfloat16()

        def measure(x: torch.Tensor = x) -> tuple[Any, str]:
            exact = batched_loop(x[None].double())[0]
            squares = x.float().square().sum()[None]
            ours, factors = orthogonalise(x[None], squares, COEFFICIENTS, 1e-7)
            y = ours[0].double() if factors is None else ours[0].double() * factors[0].double()
            results = {"exact": exact, "torch": newton_schulz_reference(x, COEFFICIENTS, 1e-7).double(), "tigon": y}
            errors = {key: ((z - exact).norm() / exact.norm()).item() for key, z in results.items()}
            text = "error " + ", ".join(f"{key} {errors[key]:.4f}" for key in ("torch", "tigon"))
            deviations = {}
            for key, z in results.items():
                z = z.mT if shape[0] > shape[1] else z
                gram = z @ z.mT
                deviations[key] = ((gram - torch.eye(len(gram), device=device)).norm() / len(gram) ** 0.5).item()
            text += "   deviation " + ", ".join(f"{key} {value:.4f}" for key, value in deviations.items())
            return {"errors": errors, "deviations": deviations}, text

        report.add(f"{shape} {name}", measure)


def time_configs(report: Report, model: str, device: str) -> None:
    """Time launch parameters of the symmetric products."""
    h, i, _, _ = MODELS[model]
    x = torch.randn(4, h, i, device=device, dtype=torch.bfloat16)
    r, _ = symmetric_product(x, x, Epilogue(1e-4))
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "programs_per_multiprocessor", "group")
    print("\nlaunch parameters: X X^T, R Z", flush=True)
    for uses_tma in (True, False):
        for config in CONFIGS if uses_tma else CONFIGS[:3]:

            def measure(config: Any = config, uses_tma: bool = uses_tma) -> tuple[Any, str]:
                with tuned(SymmetricConfig, **dict(zip(names, config, strict=True)), uses_tma=uses_tma):
                    gram = median_ms(lambda: symmetric_product(x, x, Epilogue(1e-4)), device)
                    inner = median_ms(lambda: symmetric_product(r, r, Epilogue(1.0, 0.5, r)), device)
                rates = 4e-9 * h * h * i / gram, 4e-9 * h**3 / inner
                return (gram, inner), f"{gram:7.3f} ms {rates[0]:5.0f}, {inner:7.3f} ms {rates[1]:5.0f} TFLOP/s"

            report.add(f"{config} {'TMA' if uses_tma else 'pointers'}", measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="Llama-3-8B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--configs", action="store_true", help="also time launch parameters of the symmetric product")
    arguments = parser.parse_args()
    device, begin = arguments.device, time.monotonic()
    torch.manual_seed(0)
    shapes = matrix_shapes(arguments.model)
    params = [torch.nn.Parameter(torch.randn(s, device=device, dtype=torch.bfloat16) * 0.02) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    count = sum(p.numel() for p in params)
    print(
        f"{arguments.model}: {len(params)} matrices, {count / 1e9:.2f}e9 parameters; {name}, torch {torch.__version__}"
    )
    report = Report()
    time_steps(report, params, device)
    counts = dict(collections.Counter(shapes))
    params.clear()
    del p
    for shape in counts:
        measure_errors(report, shape, device)
    for shape, number in counts.items():
        time_parts(report, shape, number, device)
    if arguments.configs:
        time_configs(report, arguments.model, device)
    # Compiling may take longer than everything before.
    if device == "cuda" and (arguments.configs or time.monotonic() - begin < 40):
        print()
        time_compiled_loop(report, counts, device)
    print(f"\n{time.monotonic() - begin:.0f} s")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "muon.json").write_text(json.dumps(report.results, indent=1))


if __name__ == "__main__":
    main()
