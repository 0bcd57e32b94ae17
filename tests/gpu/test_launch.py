"""Launches on a GPU: the self-check of direct launches, which a capture postpones, and the zeros that kernels use."""

import torch
import torch.nn.functional as F
from torch import Tensor, library

import tigon
from tigon.ops.adapters.low_rank import empty_hidden, project
from tigon.ops.fp8.formats import FusedPass
from tigon.ops.norms import kernels as norms
from tigon.ops.norms.rms_norm import rms_norm_reference
from tigon.runtime import counters, launch


def test_the_self_check_passes():
    x, weight = torch.ones(16, 64, device="cuda"), torch.ones(64, device="cuda")
    tigon.rms_norm(x, weight)
    assert launch._verdicts == {x.get_device(): True}
    assert launch.launch_method().startswith("direct")


def test_direct_launches_call_the_function_in_c():
    """Otherwise each launch takes the time of a Python function more."""
    x, weight = torch.ones(16, 64, device="cuda"), torch.ones(64, device="cuda")
    for _ in range(2):
        tigon.rms_norm(x, weight)
    calls = [call for call, *_, (kernel, _) in launch._variants.values() if kernel is norms._forward_kernel]
    assert calls
    assert not any(hasattr(call, "launch") for call in calls)


def test_the_self_check_waits_for_the_end_of_a_capture(monkeypatch):
    # No other call launches a norm of so many rows, so no plan holds its variant. Triton loads the kernel before.
    x, weight = torch.randn(17, 64, device="cuda"), torch.ones(64, device="cuda")
    tigon.rms_norm(x[:16], weight)
    expected = rms_norm_reference(x, weight)
    for name in ("_variants", "_verdicts"):
        monkeypatch.setattr(launch, name, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tigon.rms_norm(x, weight)
    assert launch._verdicts == {}
    graph.replay()
    torch.testing.assert_close(y, expected)
    assert torch.equal(tigon.rms_norm(x, weight), y)
    assert launch._verdicts == {x.get_device(): True}


def test_launches_with_other_tensors_absent_share_no_variant():
    """The launches differ only in which of dw and db is None."""
    x, weight, bias = torch.randn(16, 64, device="cuda"), torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    dy = torch.randn_like(x)
    for leaf, frozen in ((weight, bias), (bias, weight)):
        leaf.requires_grad_(True), frozen.requires_grad_(False)
        (expected,) = torch.autograd.grad(F.layer_norm(x, (64,), weight, bias), leaf, dy)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(tigon.layer_norm(x, weight, bias), leaf, dy)
            torch.testing.assert_close(gradient, expected)


@library.custom_op("tigon_tests::low_rank_product", mutates_args=())
def _low_rank_product(x: Tensor, a: Tensor) -> Tensor:
    """Run a kernel that counts its programs and finds a maximum, in an operator that the compiler does not trace."""
    maximum = FusedPass(counters.zero_number(x))
    return project(x, [a], empty_hidden(x, len(x), len(a)), fused_pass=maximum).contiguous()


_low_rank_product.register_fake(lambda x, a: x.new_empty((3, len(x), len(a))))


def test_a_compiled_graph_keeps_no_zeros_in_its_memory(monkeypatch):
    """Before the capture, torch runs the function in the memory pool of the graph. No tensor may outlive this run."""
    x, a = torch.randn(300, 640, device="cuda").bfloat16(), torch.randn(16, 640, device="cuda").bfloat16()
    expected = 2 * _low_rank_product(x, a)
    monkeypatch.setattr(counters, "_default", {})
    function = torch.compile(lambda x, a: 2 * _low_rank_product(x, a), mode="reduce-overhead")
    for _ in range(4):
        assert torch.equal(function(x, a), expected)
    assert not counters._default
