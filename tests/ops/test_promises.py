"""An op accepts the result of a collective that is still running, as tensor parallelism passes it on."""

import pytest
import torch

import tigon
from op_cases import DEVICE


@pytest.fixture
def group(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_an_op_waits_for_the_result_of_a_collective(group):
    """The result is a wrapper without memory, so a kernel that used its address would read from address 0."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    def start_all_reduce(x):
        result = all_reduce(x.detach(), "sum", group)
        assert isinstance(result, AsyncCollectiveTensor)
        return result.requires_grad_()

    x, weight, dy = (torch.randn(*shape, device=DEVICE) for shape in ((5, 64), (64,), (5, 64)))
    plain = x.clone().requires_grad_()
    expected = tigon.rms_norm(plain, weight), tigon.swiglu(plain)
    actual = tigon.rms_norm(start_all_reduce(x), weight), tigon.swiglu(start_all_reduce(x))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    expected_gradient = torch.autograd.grad(expected[0], plain, dy)[0]
    late = start_all_reduce(x)
    gradient = torch.autograd.grad(tigon.rms_norm(late, weight), late, all_reduce(dy, "sum", group))[0]
    assert torch.equal(gradient, expected_gradient)
