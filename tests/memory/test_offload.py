"""The tensors that an offloader saves: which bytes move to the host, and which values come back."""

import pytest
import torch

from tigon.memory.host_pages import HostPages
from tigon.memory.offload import Offloader, byte_range


@pytest.fixture
def offloader() -> Offloader:
    offloader = Offloader(HostPages(1024, is_pinned=False))
    offloader.begin_layer(0, moves=True)
    return offloader


def test_a_view_of_half_a_storage_or_more_is_copied_as_a_whole():
    whole = torch.empty(64, 16)
    assert byte_range(whole[:32]) == (0, 4096)
    assert byte_range(whole[33:40]) == (33 * 64 // 512 * 512, 40 * 64)
    assert byte_range(whole.t()) == (0, 4096)
    assert byte_range(whole.view(-1)[1000:1003]) == (4000 // 512 * 512, 4012)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.t(), lambda x: x[33:40], lambda x: x[:, ::2], lambda x: x.chunk(3, -1)[1][40:, 1:]],
    ids=["whole", "transposed", "rows", "gaps", "part"],
)
def test_views_come_back_with_their_shapes_and_strides(offloader, view, moves):
    x = view(torch.randn(64, 24))
    expected = x.clone()
    offloader.begin_layer(0, moves)
    saved = offloader.save(x)
    offloader.free_copied()
    # A second backward pass copies the bytes again.
    for _ in range(2):
        assert (saved.device_data is None) == moves
        y = saved.unpack()
        assert torch.equal(y, expected)
        assert y.stride() == x.stride()
    assert (saved.device_data is None) == moves


def test_a_tensor_may_be_written_after_its_copy_and_not_before(offloader):
    x, y = torch.randn(64, 16), torch.randn(64, 16)
    expected = x.clone()
    early, late = offloader.save(x), offloader.save(y)
    y.add_(1)
    offloader.free_copied()
    x.add_(1)
    assert early.is_unchanged
    assert torch.equal(early.unpack(), expected)
    assert not late.is_unchanged
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[64, 16\]\]"):
        late.unpack()
