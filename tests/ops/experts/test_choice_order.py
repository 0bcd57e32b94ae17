"""The kernels sort choices as a stable sort by expert does."""

import pytest
import torch
from torch import library

from op_cases import DEVICE
from tigon.ops.experts import choice_order
from tigon.ops.experts.choice_order import BLOCK, MOST_EXPERTS, order_choices

CASES = {
    "one choice": (1, 1, torch.int64),
    "three blocks": (2 * BLOCK + 30, 128, torch.int32), "a power of two": (BLOCK // 2 + 1, 64, torch.int16),
    "bytes": (100, 300, torch.uint8), "the most experts": (700, MOST_EXPERTS, torch.int64),
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize(("size", "experts", "dtype"), CASES.values(), ids=CASES)
def test_choices_have_the_order_of_a_stable_sort(size, experts, dtype, poisoned):
    """Absent experts have an index below 0, or of E or more. They come last."""
    generator = torch.Generator().manual_seed(size)
    first, end = (0, 256) if dtype == torch.uint8 else (-2, experts + 3)
    index = torch.randint(first, end, (size,), generator=generator, dtype=dtype)
    wide = index.long()
    present = torch.where((wide >= 0) & (wide < experts), wide, experts)
    expert, order = present.sort(stable=True)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(size))
    ends = present.bincount(minlength=experts + 1)[:experts].cumsum(0)
    # Every second number belongs to another tensor.
    strided = torch.stack([index, torch.zeros_like(index)], 1).to(DEVICE)[:, 0]
    result = order_choices(strided, experts)
    assert [x.dtype for x in result] == [torch.int64, torch.int64, torch.int16, torch.int32]
    assert result.order.tolist() == order.tolist()
    assert result.slot.tolist() == slot.tolist()
    assert result.expert.tolist() == expert.tolist()
    assert result.ends.tolist() == ends.tolist()


@pytest.mark.kernels
def test_choices_of_one_expert_keep_their_order_over_many_blocks(monkeypatch):
    """`scan` adds the counts of more blocks than one of its tiles has."""
    monkeypatch.setattr(choice_order, "TILE", 2)
    size = 3 * BLOCK
    result = order_choices(torch.full((size,), 1000, device=DEVICE), 1001)
    assert torch.equal(result.order, torch.arange(size, device=DEVICE))
    assert torch.equal(result.slot, result.order)
    assert result.ends.tolist() == [0] * 1000 + [size]


@pytest.mark.kernels
def test_route_gives_the_same_with_kernels_and_with_torch(monkeypatch):
    index = torch.tensor([[2, 0], [3, 2], [-1, 5]], device=DEVICE)
    results = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(choice_order, "has_order_kernels", lambda *args, uses=uses_kernels: uses)
        results.append(choice_order.route(index, 4))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.kernels
@pytest.mark.thorough_in_interpreter
def test_a_compiled_graph_may_have_the_kernels():
    index = torch.tensor([[2, 0], [3, 2], [-1, 5]], device=DEVICE)
    library.opcheck(torch.ops.tigon.order_choices.default, (index, 4))
