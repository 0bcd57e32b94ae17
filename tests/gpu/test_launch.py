"""Direct launches on a GPU: the self-check passes with every tested Triton, and a capture postpones it."""

import torch

import tigon
from tigon.runtime import launch
from tigon.runtime.triton_private import has_direct_launch


def test_the_self_check_passes():
    x, weight = torch.ones(16, 64, device="cuda"), torch.ones(64, device="cuda")
    tigon.rms_norm(x, weight)
    assert launch._verdicts.get(x.get_device()) is (True if has_direct_launch() else None)
    assert launch.launch_method().startswith("direct") == has_direct_launch()


def test_the_self_check_waits_for_the_end_of_a_capture(monkeypatch):
    x, weight = torch.randn(16, 64, device="cuda"), torch.ones(64, device="cuda")
    expected = tigon.rms_norm(x, weight)
    for name in ("_variants", "_verdicts"):
        monkeypatch.setattr(launch, name, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tigon.rms_norm(x, weight)
    assert launch._verdicts == {}
    graph.replay()
    assert torch.equal(y, expected)
    assert torch.equal(tigon.rms_norm(x, weight), expected)
    assert launch._verdicts == ({x.get_device(): True} if has_direct_launch() else {})
