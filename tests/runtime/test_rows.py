"""Rows of tensors, and the arguments with which an elementwise kernel is launched over them."""

import pytest

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
def test_the_numbers_of_an_op_come_after_the_strides(width, strides, expected):
    plan = rows.plan_blocks("kernel", 3, width, strides, 64, 0.5, num_warps=4)
    assert (plan.programs, *plan.numbers) == expected
    assert plan.constants == {"num_warps": 4, "BLOCK": 64}
