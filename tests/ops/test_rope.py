import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.rope import rope_reference


def _inputs(b, hq, hk, s, d, r, dtype=torch.float32, shared=False, stored="BHSD"):
    generator = torch.Generator().manual_seed(hq * s + d)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype)
    if stored == "BSHD":
        q, k = normal(b, s, hq, d).transpose(1, 2), normal(b, s, hk, d).transpose(1, 2)
    else:
        q, k = normal(b, hq, s, d), normal(b, hk, s, d)
    angles = torch.rand((1 if shared else b, s, r), generator=generator).to(DEVICE) * 100
    return [q.requires_grad_(), k.requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype)]


@pytest.mark.parametrize("stored", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 4, 4, 3, 16, 16), id="equal heads"),
        pytest.param((1, 14, 2, 5, 64, 64), id="head counts that fill no tile"),
        pytest.param((2, 3, 1, 4, 80, 32), id="a part of the head"),
        pytest.param((1, 2, 1, 3, 10, 6), id="odd sizes"),
        pytest.param((1, 40, 8, 2, 256, 256), id="wide heads"),
        pytest.param((1, 1, 1, 1, 2, 2), id="one of each"),
    ],
)
def test_accuracy(sizes, dtype, stored):
    assert_as_accurate_as_eager(tigon.rope, rope_reference, _inputs(*sizes, dtype=dtype, stored=stored))


def test_one_table_for_the_whole_batch():
    q, k, cos, sin = _inputs(3, 2, 1, 4, 16, 16, shared=True)
    shared = outputs_and_gradients(tigon.rope, [q, k, cos, sin])
    each = outputs_and_gradients(tigon.rope, [q, k, cos.expand(3, -1, -1), sin.expand(3, -1, -1)])
    own = outputs_and_gradients(tigon.rope, [q, k, cos.repeat(3, 1, 1), sin.repeat(3, 1, 1)])
    for results in (each, own):
        for a, b in zip([*shared[0], *shared[1]], [*results[0], *results[1]], strict=True):
            assert torch.equal(a, b)


def test_tables_differ_between_batch_rows_and_between_halves():
    """Each half of a row of the table is used for its own half: packed tables with unequal halves stay exact."""
    q, k, _, _ = _inputs(2, 2, 2, 3, 8, 8)
    cos, sin = torch.randn(2, 3, 8, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    got, expected = (outputs_and_gradients(f, [q, k, cos, sin]) for f in (tigon.rope, rope_reference))
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_heads_may_stand_behind_the_sequence():
    q, k, cos, sin = _inputs(2, 4, 2, 3, 16, 16)
    first = tigon.rope(q, k, cos, sin)
    second = tigon.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(first, second, strict=True))


def test_slices_of_a_packed_projection():
    """q and k of Phi-3 are slices of one tensor: their rows have gaps."""
    packed = torch.randn(2, 3, 6 * 16, device=DEVICE, requires_grad=True)
    _, _, cos, sin = _inputs(2, 4, 2, 3, 16, 16)

    def run(rope):
        q = packed[..., : 4 * 16].view(2, 3, 4, 16).transpose(1, 2)
        k = packed[..., 4 * 16 :].view(2, 3, 2, 16).transpose(1, 2)
        q, k = rope(q, k, cos, sin)
        return q, k, torch.autograd.grad(q.square().sum() + k.cos().sum(), packed)[0]

    for a, b in zip(run(tigon.rope), run(rope_reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_result_keeps_the_layout_of_its_input():
    q, k, cos, sin = _inputs(2, 4, 2, 3, 16, 16, stored="BSHD")
    turned = tigon.rope(q, k, cos, sin)
    assert [y.shape for y in turned] == [q.shape, k.shape]
    assert [y.transpose(1, 2).is_contiguous() for y in turned] == [True, True]


def test_overlapping_strides():
    base = torch.randn(2, 40, device=DEVICE)
    q = base.as_strided((2, 2, 3, 8), (40, 1, 8, 1)).requires_grad_()
    _, k, cos, sin = _inputs(2, 2, 1, 3, 8, 8)
    got = outputs_and_gradients(tigon.rope, [q, k, cos, sin])
    expected = outputs_and_gradients(tigon.rope, [q.detach().clone().requires_grad_(), k, cos, sin])
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_input_costs_nothing(monkeypatch):
    import tigon.ops.rope as module

    made, turn = [], module.rope_turn
    monkeypatch.setattr(module, "rope_turn", lambda *args: made.append(turn(*args)) or made[-1])
    q, k, cos, sin = _inputs(2, 4, 2, 3, 16, 16)
    q, k = q * 1, (k * 1).detach()
    outputs = tigon.rope(q, k, cos, sin)
    if made:  # where the kernels run
        (outputs[0].sum() + outputs[1].sum()).backward()
        assert [x.numel() for x in made[-1]] == [q.numel(), 0]


def test_wider_tables_widen_the_result():
    q, k, cos, sin = _inputs(1, 2, 1, 3, 8, 8, dtype=torch.float16)
    got, expected = (outputs_and_gradients(f, [q, k, cos.float(), sin.float()]) for f in (tigon.rope, rope_reference))
    assert [y.dtype for y in got[0]] == [y.dtype for y in expected[0]] == [torch.float32] * 2
    assert [g.dtype for g in got[1]] == [torch.float16] * 2
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_bad_input():
    q, k, cos, sin = _inputs(2, 4, 2, 3, 16, 16)
    with pytest.raises(ValueError, match=r"rope: q must have 4 dimensions, got shape \(4, 3, 16\)"):
        tigon.rope(q[0], k, cos, sin)
    with pytest.raises(ValueError, match=r"rope: k must have shape \(2, 2, 3, 16\), got \(2, 2, 2, 16\)"):
        tigon.rope(q, k[:, :, 1:], cos, sin)
    with pytest.raises(ValueError, match=r"rope: cos must have shape \(1 or 2, 3, R\), got \(2, 4, 16\)"):
        tigon.rope(q, k, cos.repeat(1, 2, 1)[:, :4], sin.repeat(1, 2, 1)[:, :4])
    with pytest.raises(ValueError, match="rope: R must be even and at most the head size 16, got R=15"):
        tigon.rope(q, k, cos[..., :15], sin[..., :15])
    with pytest.raises(ValueError, match="rope: unsqueeze_dim must be one of 1, 2, got 3"):
        tigon.rope(q, k, cos, sin, unsqueeze_dim=3)
    with pytest.raises(ValueError, match="rope: cos and sin must have the same dtype"):
        tigon.rope(q, k, cos, sin.half())
    with pytest.raises(TypeError, match="rope: sin must be a float32"):
        tigon.rope(q, k, cos, sin.long())
