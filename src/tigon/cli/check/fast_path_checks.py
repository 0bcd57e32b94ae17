"""The faster ways in which Tigon launches kernels and multiplies, and the modes of torch that its ops run in.

Each of these has a slower way with the same results. A check compares the two, and says why the faster way is not used
where it is not.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import tigon
from tigon.cli.check.report import Check, NotChecked
from tigon.runtime import cublaslt, launch, products
from tigon.runtime.device import device_of, runs_kernels
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


def _norm_and_gradient(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = tigon.rms_norm(x, weight)
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
    function = torch.compile(lambda x: tigon.rms_norm(x, weight), fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, lambda x: tigon.rms_norm(x, weight)):
        y = call(x)
        results.append((y, torch.autograd.grad(y.float().square().sum(), x)[0]))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    return ""


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "direct launches": _direct_launches,
    "ping-pong products of cuBLASLt": _ping_pong_products,
    "CUDA or HIP graphs": _graph_capture,
    "torch.compile, one graph": _compiled,
}


def fast_path_checks(device: torch.device) -> list[Check]:
    """Return the checks."""
    return [("fast-paths", name, "", functools.partial(check, device)) for name, check in CHECKS.items()]
