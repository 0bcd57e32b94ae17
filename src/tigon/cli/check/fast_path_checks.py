"""The faster ways in which Tigon launches kernels and multiplies, and the modes of torch that its ops run in.

Each of these has a slower way with the same results. A check compares the two, and says why the faster way is not used
where it is not.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import tigon
from tigon.cli.check.outcome import CheckOutcome, NotChecked, run_check
from tigon.runtime import cublaslt, launch, products
from tigon.runtime.compat.triton import gluon
from tigon.runtime.device import device_of, runs_kernels
from tigon.testing import assert_accurate

PART = "fast paths"


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


def _single_read(device: torch.device) -> str:
    """Check the cross entropy kernel that keeps rows in shared memory against eager code."""
    _needs_kernels(device)
    if gluon is None:
        raise NotChecked("this Triton has no Gluon, so cross entropy reads the logits twice")
    if not device_of(torch.empty(1, device=device)).async_copy:
        raise NotChecked("this GPU has no asynchronous copies, so cross entropy reads the logits twice")
    logits, target = _normal(256, 65536, device=device), torch.arange(256, device=device)
    losses: list[Any] = []
    gradients = []
    for function, dtype in (
        (tigon.cross_entropy, torch.bfloat16),
        (torch.nn.functional.cross_entropy, torch.float32),
        (torch.nn.functional.cross_entropy, torch.float64),
    ):
        x = logits.to(dtype).requires_grad_()
        losses.append(function(x, target))
        gradients.append(torch.autograd.grad(losses[-1], x)[0])
    assert_accurate(losses[0], losses[1], losses[2], smallest=1.0, msg="loss")
    assert_accurate(gradients[0], gradients[1].bfloat16(), gradients[2], msg="gradient")
    return "one read of the logits"


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
    "cross entropy with one read": _single_read,
    "CUDA or HIP graphs": _graph_capture,
    "torch.compile, one graph": _compiled,
}


def check_fast_paths(device: torch.device) -> Iterator[CheckOutcome]:
    """Yield the outcome of each check."""
    for name, check in CHECKS.items():
        yield run_check(PART, name, name, functools.partial(check, device))
