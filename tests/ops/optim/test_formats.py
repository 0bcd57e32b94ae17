"""The compact formats: bounds of their errors, exact masters of 24 bits, and random numbers that can be repeated."""

import torch

from tigon.ops.optim.formats import (
    QUANT_BLOCK,
    decode_squares,
    dither,
    encode_squares,
    join_master,
    philox,
    round_stochastically,
    split_master,
)


def test_a_second_moment_is_zero_only_if_its_block_is():
    v = torch.zeros(3 * QUANT_BLOCK)
    v[5], v[QUANT_BLOCK + 1] = 1.0, 1e-30
    decoded = decode_squares(*encode_squares(v)).view(3, QUANT_BLOCK)
    assert (decoded[:2] > 0).all()
    assert decoded[0].sort().values[-2] <= (0.5 / 255.5) ** 4 * 1.001
    assert (decoded[2] == 0).all()


def test_dithers_are_even_in_successive_steps_and_elements():
    """In 64 steps, and over 64 elements, every eighth of [0, 1) occurs about eight times."""
    dithers = torch.stack([dither(256, step, torch.device("cpu")) for step in range(1000, 1064)])
    assert ((dithers > 0) & (dithers < 1)).all()
    for lines in (dithers.T, dithers[:, :64]):
        counts = torch.stack([torch.bincount((line * 8).int(), minlength=8) for line in lines])
        assert counts.min() >= 6
        assert counts.max() <= 10


def test_a_master_of_24_bits_is_exact():
    """All 2^16 patterns of the lower 16 bits, at several exponents and both signs."""
    lower = torch.arange(2**16, dtype=torch.int32)
    for upper in (0x0000, 0x0080, 0x3F80, 0x3FFF, 0x7F00, -0x4080, -0x8000):
        p = ((upper << 16) + lower).view(torch.float32)
        parameter, correction = split_master(p)
        master = join_master(parameter, correction)
        # 24 bits: the nearest number whose lower 8 bits are zero.
        assert (master.view(torch.int32) & 0xFF == 0).all()
        assert ((master.view(torch.int32) - p.view(torch.int32)).abs() <= 128).all()
        # The parameter is the nearest number in bf16.
        exact = master.double()
        distances = [(x.double() - exact).abs() for x in (parameter, master.bfloat16())]
        assert (distances[0] <= distances[1]).all()
        again = split_master(master)
        assert torch.equal(again[0], parameter)
        assert torch.equal(again[1], correction)


def test_a_master_of_24_bits_keeps_nan_and_infinity():
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    special = torch.cat([special, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    parameter, correction = split_master(special)
    assert torch.equal(parameter.isnan(), special.isnan())
    torch.testing.assert_close(join_master(parameter, correction), special, rtol=0, atol=0, equal_nan=True)


def test_philox_has_the_published_values():
    """Known answers of the Random123 library for the key 0."""
    assert [int(x) for x in philox((torch.tensor(0), 0, 0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_stochastic_rounding_is_right_on_average_and_repeats():
    n = 200_000
    p = torch.full((n,), 1.0) + 2.0**-7 * 0.3
    rounded = round_stochastically(p, key=1, step=2)
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    # Five standard deviations.
    assert abs((rounded > 1).double().mean() - 0.3) < 5 * (0.21 / n) ** 0.5
    assert torch.equal(rounded, round_stochastically(p, key=1, step=2))
    for other in (round_stochastically(p, key=2, step=2), round_stochastically(p, key=1, step=3)):
        assert (rounded == other).float().mean() < 0.7
    # Numbers that bf16 has do not change.
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_stochastically(exact.float(), 0, 0), exact)
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    torch.testing.assert_close(round_stochastically(special, 0, 0).float(), special, equal_nan=True)
