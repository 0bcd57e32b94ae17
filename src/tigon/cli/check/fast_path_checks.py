"""The faster ways in which Tigon launches kernels and multiplies, and the modes of torch that its ops run in.

Each of these has a slower way with the same results. A check compares the two, and says why the faster way is not used
where it is not. The last check measures how much of a training step is the time of the host.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tigon
from tigon.cli.check.model_checks import VOCABULARY, make_batch, tiny_model
from tigon.cli.check.report import Check, NotChecked
from tigon.runtime import cublaslt, launch, products
from tigon.runtime.device import device_of, runs_kernels
from tigon.runtime.requirements import unmet
from tigon.testing import assert_accurate


def _normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def _needs_kernels(device: torch.device) -> None:
    if not runs_kernels(torch.empty(1, device=device)):
        raise NotChecked("no kernels run on this device")


def _direct_launches(device: torch.device) -> str:
    """Check that a kernel that is launched without Triton's own launch writes the same values."""
    _needs_kernels(device)
    x, weight = _normal(64, 256, device=device), _normal(256, device=device)
    for _ in range(2):
        tigon.rms_norm(x, weight)
    verdict = launch.self_check_verdict(device.index or 0)
    if verdict is None:
        raise NotChecked(launch.launch_method())
    assert verdict, f"the self-check failed, so launches go {launch.launch_method()}"
    return launch.launch_method()


def _ping_pong_products(device: torch.device) -> str:
    """Check a product by a kernel of cuBLASLt against one by torch."""
    _needs_kernels(device)
    a, b = _normal(1024, 1024, device=device), _normal(1024, 2048, device=device)
    config = products.ProductConfig.find(products.ProductProblem(a.element_size()), device_of(a))
    if config is None:
        raise NotChecked(f"only Hopper GPUs have these kernels, and this is {device_of(a).arch}")
    torch.mm(a, b)
    out = torch.empty(1024, 2048, dtype=torch.float32, device=device)
    if cublaslt.state().startswith(("off", "not used")):
        raise NotChecked(cublaslt.state())
    products.product(a, b, out)
    exact = a.double() @ b.double()
    assert_accurate(out, (a.float() @ b.float()), exact, smallest=32.0, msg="product")
    return cublaslt.state()


def _norm_and_gradient(x: Tensor, weight: Tensor, norm: Callable[..., Tensor] = tigon.rms_norm) -> tuple[Tensor, ...]:
    y = norm(x, weight)
    return y, torch.autograd.grad(y.float().square().sum(), x)[0]


def _graph_capture(device: torch.device) -> str:
    """Check that a replayed CUDA graph (HIP graph) of an op computes from the new values of its input."""
    _needs_kernels(device)
    x, weight = _normal(64, 256, device=device).requires_grad_(), _normal(256, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            _norm_and_gradient(x, weight)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _norm_and_gradient(x, weight)
    with torch.no_grad():
        x.copy_(_normal(64, 256, device=device).flip(0))
    graph.replay()
    for actual, expected in zip(captured, _norm_and_gradient(x, weight), strict=True):
        assert torch.equal(actual, expected), "a replayed graph gives other results than a call"
    return ""


def _compiled(device: torch.device) -> str:
    """Check that torch.compile traces an op as one graph with the same results. No code is generated."""
    x, weight = _normal(64, 256, device=device).requires_grad_(), _normal(256, device=device)
    compiled_norm = torch.compile(lambda x, weight: tigon.rms_norm(x, weight), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_norm_and_gradient(x, weight, compiled_norm), _norm_and_gradient(x, weight))
    return ""


def _step_times(device: torch.device, **options: Any) -> tuple[float, float]:
    """Return the ms of a training step of a tiny patched model, and the ms in which the GPU works in it."""
    model, batch = tiny_model("llama", device), make_batch(VOCABULARY, device=str(device))
    report = tigon.patch(model, **options)

    def train(steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            model(**batch).loss.backward()
        torch.cuda.synchronize(device)

    # A signature is captured at its third use.
    train(5)
    if report.graphs is not None and not report.graphs.captured:
        raise AssertionError(f"no graph was captured: {report.graphs}")
    start = time.perf_counter()
    train(20)
    step_ms = (time.perf_counter() - start) * 1e3 / 20
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train(5)
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return step_ms, sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e3 / 5


def _step_to_gpu_time(device: torch.device) -> str:
    """Compare the time of a step of a tiny model with the work of the GPU in it. The rest is the time of the host."""
    if device.type != "cuda":
        raise NotChecked("needs a GPU")
    if reason := unmet("transformers", extra="hf"):
        raise NotChecked(reason)
    (eager_ms, eager_gpu_ms), (ms, gpu_ms) = _step_times(device), _step_times(device, graphs=True)
    return (
        f"a step takes {eager_ms:.1f} ms, {eager_ms / eager_gpu_ms:.1f} times its GPU time; with graphs=True "
        f"{ms:.2f} ms, {ms / gpu_ms:.1f} times"
    )


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "direct launches": _direct_launches,
    "ping-pong products of cuBLASLt": _ping_pong_products,
    "CUDA or HIP graphs": _graph_capture,
    "torch.compile, one graph": _compiled,
    "step to GPU time, tiny model": _step_to_gpu_time,
}


def fast_path_checks(device: torch.device) -> list[Check]:
    """Return the checks."""
    return [("fast-paths", name, "", functools.partial(check, device)) for name, check in CHECKS.items()]
