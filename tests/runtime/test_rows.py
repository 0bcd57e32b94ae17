"""Rows of tensors, and the arguments with which an elementwise kernel is launched over them."""

import pytest
import torch

from tigon.runtime import rows

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")


@pytest.mark.parametrize(
    ("width", "strides", "expected"),
    [
        (32, (32, 32), (2, 0, 0, 0.5, 96, 2)),
        (32, (40, 32), (3, 40, 32, 0.5, 32, 1)),
        (33, (33, 33), (3, 33, 33, 0.5, 33, 1)),
    ],
    ids=["one long row", "gaps between rows", "an odd width"],
)
def test_the_numbers_of_an_op_come_after_the_strides(width, strides, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(rows, "launch", lambda *arguments, **constants: calls.append((arguments, constants)))
    x, y = torch.zeros(3, width), torch.zeros(3, width)
    rows.launch_blocks("kernel", width, (x, y), strides, 64, 0.5, num_warps=4)
    ((kernel, programs, *arguments), constants) = calls[0]
    assert (kernel, arguments[0] is x, arguments[1] is y) == ("kernel", True, True)
    assert (programs, *arguments[2:]) == expected
    assert constants == {"num_warps": 4, "BLOCK": 64}
