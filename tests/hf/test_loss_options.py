"""Options of the loss in the head that a call of a patched model, or the patch, sets."""

import pytest
import torch

import tigon
from tigon.hf import head

transformers = pytest.importorskip("transformers")


@pytest.fixture
def scored(make_model, batch):
    """Return a model, its batch, and the log-probabilities and predictions of the valid targets, from the logits."""
    model = make_model()
    logits = model(**{**batch, "labels": None}).logits[:, :-1].detach().double()
    targets = batch["labels"][:, 1:]
    valid = targets != -100
    log_p = torch.log_softmax(logits, -1)[valid].gather(-1, targets[valid][:, None])[:, 0]
    return model, batch, log_p, logits[valid].argmax(-1) == targets[valid]


@pytest.mark.parametrize("from_call", [True, False])
def test_token_scaling_and_accuracy_follow_their_formulas(scored, from_call):
    """An option of one call does not stay, and a call overrides the patch."""
    model, batch, log_p, hits = scored
    options = {"token_scaling": True, "return_token_accuracy": True}
    tigon.patch(model, **({} if from_call else options))
    outputs = model(**batch, **(options if from_call else {}))
    assert outputs.loss.item() == pytest.approx((-log_p * log_p.exp()).mean().item(), rel=1e-5)
    assert outputs.token_accuracy.item() == pytest.approx(hits.double().mean().item())
    outputs.loss.backward()
    outputs = model(**batch, **({} if from_call else dict.fromkeys(options, False)))
    assert outputs.loss.item() == pytest.approx(-log_p.mean().item(), rel=1e-5)
    assert not hasattr(outputs, "token_accuracy")


@pytest.mark.parametrize(("training", "with_accuracy"), [(True, False), (False, True)])
def test_predicted_tokens_are_those_of_the_logits(make_model, batch, training, with_accuracy):
    model = make_model()
    logits, targets = model(**{**batch, "labels": None}).logits, batch["labels"].roll(-1, 1)
    targets[:, -1] = -100
    tigon.patch(model)
    options = {"return_predicted_tokens": True, "return_token_accuracy": with_accuracy, "skip_logits": True}
    outputs = model.train(training)(**batch, **options)
    assert torch.equal(outputs.predicted_tokens, logits.argmax(-1).masked_fill(targets == -100, -1))
    assert (outputs.token_accuracy is not None) == with_accuracy
    assert not hasattr(model(**batch), "predicted_tokens")
    with pytest.raises(TypeError, match="model: return_predicted_tokens must be .*got 1"):
        model(**batch, return_predicted_tokens=1)


def test_acc_dtype_reaches_the_fused_loss(make_model, batch, monkeypatch):
    model = make_model()
    tigon.patch(model)
    dtypes, stock = [], head.linear_cross_entropy
    monkeypatch.setattr(
        head, "linear_cross_entropy", lambda *args, **kw: dtypes.append(kw["acc_dtype"]) or stock(*args, **kw)
    )
    model(**batch, acc_dtype=torch.float32)
    model(**batch)
    assert dtypes == [torch.float32, None]


def test_calls_that_compute_logits_take_no_token_scaling(make_model, batch):
    model = make_model()
    tigon.patch(model, token_scaling=True)
    model.eval()
    assert not hasattr(model(**batch, return_token_accuracy=True), "token_accuracy")
    tigon.patch(plain := make_model())
    plain.eval()
    with pytest.raises(ValueError, match="model: token_scaling=True needs the loss in the head"):
        plain(**batch, token_scaling=True)
    fused = plain(**batch, token_scaling=True, return_token_accuracy=True, skip_logits=True)
    assert 0 <= fused.token_accuracy.item() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_scaling": 1}, "token_scaling must be .*got 1"),
        ({"return_token_accuracy": "yes"}, "return_token_accuracy must be .*got 'yes'"),
        ({"acc_dtype": torch.float16}, "acc_dtype must be .*got torch.float16"),
    ],
)
def test_wrong_values_are_refused(make_model, batch, options, message):
    model = make_model()
    with pytest.raises((TypeError, ValueError), match=f"patch: {message}"):
        tigon.patch(model, **options)
    assert "forward" not in vars(model)
    tigon.patch(model)
    with pytest.raises((TypeError, ValueError), match=f"model: {message}"):
        model(**batch, **options)
