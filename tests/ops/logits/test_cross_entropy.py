import pytest
import torch
import torch.nn.functional as F

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from ops.logits.cross_entropy_cases import OPTIONS, SHAPES, class_weights, logits_of, target_of
from tigon.ops.logits.cross_entropy import cross_entropy_reference


@one_in(
    3, shape=SHAPES, options=OPTIONS, weighted={"": False, "class weights": True},
    inplace={"new buffer": False, "in place": True},
)  # fmt: skip
@pytest.mark.sampled(in_interpreter=3)
def test_cross_entropy_is_as_accurate_as_eager_code(shape, options, weighted, inplace):
    """With token scaling, only likely targets contribute, so gradients are differences of 1 / D and nearly 1 / D."""
    target = target_of(*shape[:-1], v=shape[-1])
    weight = class_weights(shape[-1]) if weighted else None
    assert_as_accurate_as_eager(
        lambda x: tigon.cross_entropy(x.clone(), target, weight, inplace=inplace, **options),
        lambda x: cross_entropy_reference(x, target, weight, **options), [logits_of(*shape)], loss=True,
        term_size=0.1 if "token_scaling" in options else 0.0,
    )  # fmt: skip


@one_in(1, reduction=["none", "mean", "sum"], smoothing=[0.0, 0.3], weighted={"": False, "class weights": True})
def test_cross_entropy_agrees_with_torch(weighted, smoothing, reduction):
    logits, target = logits_of(9, 40), target_of(9, v=40)
    weight = class_weights(40) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    ours, theirs = (
        tigon.cross_entropy(logits, target, weight, **options), F.cross_entropy(logits, target, weight, **options),
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    upstream = torch.rand_like(ours)
    gradients = [torch.autograd.grad(y, logits, upstream)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_inplace_alone_overwrites_the_logits_with_the_gradient():
    values, target = logits_of(6, 30).detach(), target_of(6, v=30)
    plain = values.clone().requires_grad_()
    hidden = plain * 1.0
    before = hidden.detach().clone()
    (expected,) = torch.autograd.grad(tigon.cross_entropy(hidden, target), hidden)
    assert torch.equal(hidden, before)

    hidden = plain * 1.0
    loss = tigon.cross_entropy(hidden, target, inplace=True)
    torch.testing.assert_close(hidden.detach(), expected)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.data_ptr() == hidden.data_ptr()


def test_inplace_does_not_change_logits_that_need_no_gradient():
    logits, target = logits_of(6, 30).detach(), target_of(6, v=30)
    before = logits.clone()
    tigon.cross_entropy(logits, target, inplace=True)
    with torch.no_grad():
        tigon.cross_entropy(logits.requires_grad_(), target, inplace=True)
    assert torch.equal(logits, before)


def test_autograd_notices_that_inplace_changed_saved_logits():
    """exp saves its output for backward. If it is overwritten, autograd must raise an error."""
    x, target = logits_of(6, 30), target_of(6, v=30)
    hidden = x.exp()
    loss = tigon.cross_entropy(hidden, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_supports_two_backward_passes():
    values, target = logits_of(6, 30).detach(), target_of(6, v=30)
    x = values.requires_grad_()
    expected = torch.autograd.grad(tigon.cross_entropy(x * 1.0, target), x)[0]
    loss = tigon.cross_entropy(x * 1.0, target, inplace=True)
    for factor in (3.0, 0.0, 0.5):
        (gradient,) = torch.autograd.grad(loss, x, loss.new_tensor(factor), retain_graph=True)
        torch.testing.assert_close(gradient, factor * expected, rtol=1e-6, atol=1e-9)
    (gradient,) = torch.autograd.grad(2 * loss, x)
    torch.testing.assert_close(gradient, 2 * expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("inplace", [False, True], ids=["new buffer", "in place"])
def test_ignored_rows_have_zero_gradients_for_any_values(inplace):
    logits, target = logits_of(4, 30).detach(), torch.tensor([3, -100, 5, -100], device=DEVICE)
    logits[1], logits[3] = torch.nan, torch.inf
    logits.requires_grad_()
    loss = tigon.cross_entropy(logits, target, inplace=inplace, label_smoothing=0.1, z_loss=0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert (gradient[[1, 3]] == 0).all()
    assert (gradient[[0, 2]] != 0).all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_is_zero_and_differentiable_if_all_rows_are_ignored(reduction):
    logits, target = logits_of(4, 30), torch.full((4,), -100, device=DEVICE)
    result = tigon.cross_entropy(logits, target, reduction=reduction, return_z_loss=True, return_token_accuracy=True)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logits)
    assert (result.loss == 0).all()
    assert (gradient == 0).all()
    assert result.token_accuracy == 0


@one_in(1, inplace={"new buffer": False, "in place": True}, bad=[30, 10**6, 2**40, -1, -101])
def test_out_of_range_target_gives_nan_in_its_row_only(bad, inplace):
    logits, target = logits_of(4, 30), torch.tensor([3, bad, -100, 29], device=DEVICE)
    hidden = logits * 1.0
    loss = tigon.cross_entropy(hidden, target, reduction="none", inplace=inplace)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, True, False, False]
    assert gradient.isnan().all(-1).tolist() == [False, True, False, False]
    assert gradient[[0, 2, 3]].isfinite().all()
    for reduction in ("mean", "sum"):
        assert tigon.cross_entropy(logits, target, reduction=reduction, weight=class_weights(30)).isnan()


def test_further_results_are_returned_on_request():
    logits, target = logits_of(8, 30), target_of(8, v=30)
    result = tigon.cross_entropy(
        logits, target, z_loss=0.1, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True
    )
    valid, lse, best = target != -100, logits.logsumexp(-1), logits.argmax(-1)
    torch.testing.assert_close(result.z_loss, (0.1 * lse.square())[valid].mean())
    torch.testing.assert_close(result.loss - result.z_loss, F.cross_entropy(logits, target), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.token_accuracy, (best == target)[valid].float().mean())
    assert torch.equal(result.predicted_tokens, best.masked_fill(~valid, -1))
    assert not result.z_loss.requires_grad
    alone = tigon.cross_entropy(logits, target, return_predicted_tokens=True)
    assert alone.z_loss is None
    assert alone.token_accuracy is None


def test_predicted_token_is_the_first_of_equal_logits_in_any_block():
    logits, target = torch.zeros(3, 9000, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    logits[1, [4097, 8999]] = 5.0
    logits[2, 8999] = 5.0
    result = tigon.cross_entropy(logits, target, return_predicted_tokens=True)
    assert result.predicted_tokens.tolist() == [0, 4097, 8999]


EQUAL = {
    "items": ({"num_items": 13}, lambda x, t: F.cross_entropy(x, t, reduction="sum") / 13),
    "items in fp64": ({"num_items": 13.0}, lambda x, t: F.cross_entropy(x, t, reduction="sum") / 13),
    "items in a tensor": ({"num_items": torch.tensor(13)}, lambda x, t: F.cross_entropy(x, t, reduction="sum") / 13),
    "items in a list": ({"num_items": torch.tensor([13.0])}, lambda x, t: F.cross_entropy(x, t, reduction="sum") / 13),
    "no ignore_index": ({"ignore_index": None}, F.cross_entropy),
    "a class is ignored": ({"ignore_index": 3}, lambda x, t: F.cross_entropy(x, t, ignore_index=3)),
}


@pytest.mark.parametrize(("options", "expected"), EQUAL.values(), ids=EQUAL)
def test_forms_of_options_have_the_meaning_of_torch(options, expected):
    logits, target = logits_of(8, 30), target_of(8, v=30)
    if options.get("ignore_index") == 3:
        target[target == -100] = 3
    for labels in (target, target.int()):
        torch.testing.assert_close(tigon.cross_entropy(logits, labels, **options), expected(logits, target))


def test_vocabulary_may_have_one_class():
    logits, target = logits_of(5, 1), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    loss = tigon.cross_entropy(logits, target)
    assert loss == 0
    assert (torch.autograd.grad(loss, logits)[0] == 0).all()


@pytest.mark.parametrize("inplace", [False, True], ids=["new buffer", "in place"])
def test_fp16_gradients_use_the_loss_scale(inplace):
    """1 / items underflows in fp16. The loss scale of the upstream gradient prevents this."""
    logits, target = logits_of(4, 5000, dtype=torch.float16), target_of(4, v=5000)
    scale = torch.tensor(65536.0, device=DEVICE)
    run = lambda f: torch.autograd.grad(f(logits * 1.0), logits, scale)[0].float()
    actual = run(lambda x: tigon.cross_entropy(x, target, num_items=8192, inplace=inplace))
    expected = run(lambda x: F.cross_entropy(x.float(), target, reduction="sum") / 8192)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True], ids=["new buffer", "in place"])
def test_rows_may_share_memory(inplace):
    target = torch.tensor([0, 3, 15, 7], device=DEVICE)
    for overlapping in (lambda: torch.randn(1, 16).expand(4, 16), lambda: torch.randn(64).unfold(0, 16, 1)[:4]):
        torch.manual_seed(0)
        logits = overlapping().to(DEVICE)
        dense = logits.clone().requires_grad_()
        logits.requires_grad_()
        actual = torch.autograd.grad(tigon.cross_entropy(logits, target, inplace=inplace), logits)[0]
        torch.testing.assert_close(actual, torch.autograd.grad(F.cross_entropy(dense, target), dense)[0])


@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
def test_label_smoothing_is_accurate_for_logits_far_from_zero(weighted):
    """A shift of all logits changes nothing, and the loss must not lose digits."""
    logits, target = logits_of(16, 5000).detach(), target_of(16, v=5000)
    weight = class_weights(5000) if weighted else None
    shifted = logits + 1000.0
    options = {"label_smoothing": 0.5, "weight": weight}
    exact = cross_entropy_reference(shifted.double(), target, **options)
    torch.testing.assert_close(tigon.cross_entropy(shifted, target, **options).double(), exact, rtol=1e-6, atol=0)


def test_module_computes_the_function():
    logits, target = logits_of(8, 30), target_of(8, v=30)
    module = tigon.CrossEntropyLoss(class_weights(30), label_smoothing=0.1, softcap=5.0).to(DEVICE)
    expected = cross_entropy_reference(logits, target, class_weights(30), label_smoothing=0.1, softcap=5.0)
    torch.testing.assert_close(module(logits, target), expected)
    assert list(module.state_dict()) == ["weight"]
    with pytest.raises(ValueError, match="CrossEntropyLoss: an option must be one of .*got 'soft_cap'"):
        tigon.CrossEntropyLoss(soft_cap=5.0)
