"""The loss does not depend on the time at which valid rows are determined, and refuses those of another target."""

import pytest
import torch

import tigon
from op_cases import DEVICE, one_in

# The kernel takes 2048 targets at a time.
LENGTHS = [0, 1, 7, 2048, 2049, 5000]

PATTERNS = {
    "none": lambda n: torch.zeros(n, dtype=torch.bool), "all": lambda n: torch.ones(n, dtype=torch.bool),
    "the last": lambda n: torch.arange(n) == n - 1, "all but the first": lambda n: torch.arange(n) > 0,
    "every third": lambda n: torch.arange(n) % 3 == 1,
}  # fmt: skip


def _target(valid: torch.Tensor, ignore_index: int = -100, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(len(valid)).where(valid, ignore_index).to(DEVICE, dtype)


@one_in(3, n=LENGTHS, pattern=list(PATTERNS), ignore_index=[-100, 0, 2**20], dtype=[torch.int64, torch.int32])
def test_valid_rows_are_found_and_counted(n, pattern, ignore_index, dtype):
    target = _target(PATTERNS[pattern](n), ignore_index, dtype)
    expected = (target.cpu() != ignore_index).nonzero()[:, 0]
    rows = tigon.ValidRows(target, ignore_index)
    assert rows.count == len(expected)
    assert isinstance(rows.count, int)
    assert rows.rows.dtype == torch.int64
    assert rows.rows.device == target.device
    assert torch.equal(rows.rows.cpu(), expected)


def test_rows_cover_all_leading_dimensions():
    labels = _target(PATTERNS["every third"](24)).view(2, 12)
    # This view is not dense.
    shifted = labels[:, 1:]
    expected = (shifted.reshape(-1) != -100).nonzero()[:, 0]
    assert torch.equal(tigon.ValidRows(shifted).rows, expected)
    inputs = _inputs(22)
    early = tigon.ValidRows(shifted)
    x = inputs[0].view(2, 11, 8)
    loss = tigon.linear_cross_entropy(x, inputs[1], labels[:, 1:], valid_rows=early)
    assert torch.equal(loss, tigon.linear_cross_entropy(x, inputs[1], shifted))


def _inputs(t: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    return [torch.randn(n, 8, generator=generator).to(DEVICE).requires_grad_() for n in (t, 50)]


@one_in(2, reduction=["mean", "none"], pattern=list(PATTERNS), dtype=[torch.int64, torch.int32])
def test_loss_does_not_depend_on_when_rows_are_found(reduction, pattern, dtype):
    target = _target(PATTERNS[pattern](30), dtype=dtype)
    early = tigon.ValidRows(target)
    results = []
    for valid_rows in (early, None):
        tensors = _inputs(30)
        loss = tigon.linear_cross_entropy(*tensors, target, reduction=reduction, valid_rows=valid_rows)
        results.append([loss, *torch.autograd.grad(loss.sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inference_tensors_without_versions_are_accepted():
    """Tensors of inference mode do not count how often they were written to."""
    with torch.inference_mode():
        target = _target(PATTERNS["every third"](30))
        early = tigon.ValidRows(target)
        x, w = _inputs(30)
        loss = tigon.linear_cross_entropy(x, w, target, valid_rows=early)
    torch.testing.assert_close(loss.clone(), tigon.linear_cross_entropy(x, w, target.clone()).detach())
    early.check("", target, -100)


def test_rows_of_another_target_are_refused():
    target = _target(PATTERNS["every third"](30))
    tensors, early = _inputs(30), tigon.ValidRows(target)
    run = lambda target, rows, **options: tigon.linear_cross_entropy(*tensors, target, valid_rows=rows, **options)
    run(target, early)
    rule = "linear_cross_entropy: valid_rows must be those of the target, got those of another tensor"
    for other in (target.clone(), target.int(), target.flip(0)):
        with pytest.raises(ValueError, match=rule):
            run(other, early)
    with pytest.raises(ValueError, match="must have ignore_index=3, got -100"):
        run(target, early, ignore_index=3)
    twice = torch.cat((target, target))
    with pytest.raises(ValueError, match=rule):
        run(twice[::2], tigon.ValidRows(twice[:30]))
    with pytest.raises(ValueError, match=rule):
        run(twice[1:31], tigon.ValidRows(twice[:30]))
    target[0] = 5
    with pytest.raises(ValueError, match="must be those of the current target, got those of its earlier values"):
        run(target, early)
    run(target, tigon.ValidRows(target))
    assert run(target, False) == run(target, None), "both calls must compute the same loss"
    with pytest.raises(
        TypeError, match="linear_cross_entropy: valid_rows must be a tigon.ValidRows or False, got list"
    ):
        run(target, [0, 1])


@one_in(1, ignore_index=[2**32, 2**32 - 100, -(2**40)], dtype=[torch.int32, torch.int64])
def test_ignore_index_may_exceed_the_dtype_of_the_target(dtype, ignore_index):
    """A comparison in 32 bits would use another index: 0, or -100."""
    target = torch.tensor([0, 3, 0, 5], device=DEVICE).to(dtype)
    x, w = _inputs(4)
    options = {"reduction": "none", "ignore_index": ignore_index, "return_token_accuracy": True}
    result = tigon.linear_cross_entropy(x, w, target, **options)
    expected = torch.nn.functional.cross_entropy(x @ w.t(), target.long(), reduction="none")
    torch.testing.assert_close(result.loss, expected)
    assert result.token_accuracy == ((x @ w.t()).argmax(-1) == target).float().mean()
    assert tigon.ValidRows(target, ignore_index).count == 4
    logits = tigon.cross_entropy(x @ w.t(), target, **options)
    torch.testing.assert_close(logits.loss, expected)
    assert logits.token_accuracy == result.token_accuracy


def test_default_device_has_no_effect():
    target, (x, w) = torch.tensor([0, -100, 3, 5], device=DEVICE), _inputs(4)
    expected = tigon.linear_cross_entropy(x, w, target)
    with torch.device("meta"):
        assert tigon.ValidRows(target).count == 3
        assert torch.equal(tigon.linear_cross_entropy(x, w, target), expected)
