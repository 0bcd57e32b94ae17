"""Models whose loss stays stock, with the reason that the report gives."""

import functools
import re

import pytest
import torch
from torch import nn

import tigon
from hf.changes import COMPUTATIONS, LOSS_ALONE, is_fused, loss_entry, with_extra, with_logits, with_outputs
from hf.tiny import tiny_model

loss_utils = pytest.importorskip("transformers.loss.loss_utils")

MORE = r"its forward does more to the logits than a scale and a soft cap"
EACH_TIME = "its forward changes the logits in a different way each time"
# Which of the two reasons is found first depends on the change.
MORE_OR_EACH_TIME = f"({MORE}|{EACH_TIME})"


def computes(name: str) -> str:
    return rf"its forward computes more than its loss from its logits \(.*{name}.*\)"


def one_entry(model, logits):
    logits = logits.clone()
    logits[..., 100] = -1e9
    return logits


class HalfOfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


LOGITS = {
    "shift": (lambda model, x: x + 1e-3, MORE_OR_EACH_TIME),
    "clamp": (lambda model, x: x.clamp(-40, 40), MORE_OR_EACH_TIME),
    "depends on values": (lambda model, x: x * x.abs().mean(), MORE_OR_EACH_TIME),
    "sign": (lambda model, x: -x, MORE_OR_EACH_TIME),
    "one entry": (one_entry, MORE_OR_EACH_TIME),
    "another curve": (lambda model, x: 20 * torch.tanh(x / 20 + x**3), MORE_OR_EACH_TIME),
    "permuted": (lambda model, x: torch.cat((x[..., 1:], x[..., :1]), -1), MORE_OR_EACH_TIME),
    "a scale that is trained": (lambda model, x: x * model.temperature.abs(), EACH_TIME),
    "a scale in a buffer": (lambda model, x: x * model.factor, EACH_TIME),
    # The stand-in of the body has its tensors on meta.
    "a scale that is trained inside the body": (lambda model, x: x * model.model.scale, "its forward.*"),
    "detached": (lambda model, x: x.detach(), computes("detach")),
    "interpolated": (lambda model, x: torch.lerp(x, 2 * x, 0.5), computes("lerp")),
    "half of the gradient": (
        lambda model, x: HalfOfTheGradient.apply(x), "the gradients of its loss are not those of the standard loss",
    ),
}  # fmt: skip


def compute_the_loss(model, outputs, labels):
    if labels is not None:
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        outputs.loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    return outputs


def loss_in_forward(model):
    """Compute the loss without `model.loss_function`."""
    forward = type(model).forward

    class Changed(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            return compute_the_loss(self, forward(self, *args, **kwargs), labels)

    model.__class__ = Changed


def regularise(model, outputs, labels):
    if outputs.loss is not None:
        outputs.loss = outputs.loss + outputs.logits.square().mean()
    return outputs


def weighted(logits, labels, vocab_size, **options):
    weight = options.pop("loss_weight", 1.0)
    return weight * loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **options)


loss_of_transformers = functools.wraps(loss_utils.ForCausalLMLoss)


class Weighted:
    def __call__(self, *args, **options):
        return weighted(*args, **options)


def loss_function(function):
    return lambda model: setattr(model, "loss_function", function)


def in_transformers(source: str):
    """Return a loss function that seems to be written in transformers."""
    namespace = dict(vars(loss_utils))
    exec(source, namespace)
    return namespace["loss"]


UNLIKE_STANDARD = in_transformers(
    "def loss(logits, labels, vocab_size, **kwargs):\n"
    "    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))"
)


class Quantised(torch.Tensor):
    """A subclass like those of libraries for quantised weights."""


def quantise(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Quantised))


class WithoutSizes(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = weight, None

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


# The forwards of heads that are no plain linear layers.
linear, normalize = nn.functional.linear, nn.functional.normalize
HEADS = {
    "Normalised": lambda self, x: linear(x, normalize(self.weight)),
    "DetachesItsInput": lambda self, x: linear(x.detach(), self.weight, self.bias),
    "DetachesItsWeight": lambda self, x: linear(x, self.weight.detach(), self.bias),
    "InFp32": lambda self, x: linear(x.float(), self.weight.float(), self.bias),
    "HalfInEvaluation": lambda self, x: nn.Linear.forward(self, x) * (1.0 if self.training else 0.5),
}


def exchange_the_head(model, name: str) -> None:
    model.lm_head.__class__ = type(name, (nn.Linear,), {"forward": HEADS[name]})


REPLACED = rf"its loss function was replaced \(by {__name__}\)"
OTHERS = {
    **{f"computes {name}": (with_extra(f), computes("")) for name, f in COMPUTATIONS.items() if name != "numpy"},
    **{
        name: (
            lambda model, name=name: exchange_the_head(model, name),
            rf"its head \({name}\) is not a plain linear layer",
        )
        for name in HEADS
    },
    "a head without sizes": (
        lambda model: setattr(model, "lm_head", WithoutSizes(model.lm_head.weight)),
        r"its head \(WithoutSizes\) is not a plain linear layer",
    ),
    "a quantised head": (quantise, "the weight of its head is a Quantised"),
    "a loss in forward": (loss_in_forward, "its forward computes its loss without model.loss_function"),
    "a regulariser": (with_outputs(regularise), computes("square")),
    "a function": (loss_function(weighted), REPLACED),
    "an object": (loss_function(Weighted()), REPLACED),
    "a wrapper": (loss_function(loss_of_transformers(lambda *x, **k: weighted(*x, **k))), REPLACED),
    "a partial": (loss_function(functools.partial(weighted)), REPLACED),
    "another loss of transformers": (loss_function(UNLIKE_STANDARD), "its loss is not the standard loss: .*"),
    "a forward of another library": (
        lambda model: setattr(model, "forward", lambda **kwargs: None), r"its forward was already replaced \(by.*",
    ),
    "a head of another library": (
        lambda model: setattr(model.lm_head, "forward", lambda x: x),
        r"Linear: its forward was already replaced \(by.*",
    ),
    "a call of the head": (
        lambda model: setattr(model.lm_head, "_call_impl", model.lm_head._call_impl),
        "the call of its head was replaced, and may change the logits",
    ),
    "a hook on the head": (
        lambda model: model.lm_head.register_forward_hook(lambda head, args, output: 2 * output),
        rf"a hook on its head \(by {__name__}\) may change the logits",
    ),
}  # fmt: skip


CHANGES = {name: (with_logits(change), reason) for name, (change, reason) in LOGITS.items()} | OTHERS


@pytest.mark.parametrize("name", CHANGES)
def test_the_loss_stays_stock_with_a_reason(make_model, batch, name):
    change, reason = CHANGES[name]
    model = make_model(num_hidden_layers=1)
    model.temperature, model.model.scale = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(()))
    model.register_buffer("factor", torch.ones(()))
    change(model)
    before = model(**batch).loss if name in LOGITS else None
    entry = loss_entry(tigon.patch(model, **LOSS_ALONE))
    assert not entry.replaced
    assert re.fullmatch(reason, entry.detail)
    assert before is None or torch.equal(model(**batch).loss, before)


def test_the_loss_is_stock_if_an_auxiliary_loss_reads_the_logits():
    model = tiny_model("bamba")
    model.z_loss_coefficient = 0.1
    assert re.fullmatch(computes("logsumexp"), loss_entry(tigon.patch(model, **LOSS_ALONE)).detail)


def test_a_standard_loss_with_another_option_is_fused_in_calls_without_it(make_model, clone, batch):
    model = make_model(num_hidden_layers=1)
    loss = in_transformers(
        "def loss(logits, labels, vocab_size, temperature=1.0, **kwargs):\n"
        "    return ForCausalLMLoss(logits / temperature, labels, vocab_size, **kwargs)"
    )
    model.loss_function = loss
    stock = clone(model)
    report = tigon.patch(model)
    assert is_fused(model(**batch))
    assert torch.equal(model(**batch, temperature=2.0).loss, stock(**batch, temperature=2.0).loss)
    report.restore()
    assert model.loss_function is loss


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda model, x: x / 3, "scale 0.333333"),
        (lambda model, x: 8 * torch.tanh(x / 12), "scale 0.666667, softcap 8"),
        (lambda model, x: 1.5 * (9 * torch.tanh(x / 9)).float(), "scale 1.5, softcap 13.5"),
    ],
    ids=["divisor", "two sizes", "a scale after the cap"],
)
def test_a_known_change_of_the_logits_is_fused_in_any_forward(
    make_model, clone, batch, assert_same_step, change, detail
):
    model = make_model()
    with_logits(change)(model)
    stock = clone(model)
    assert detail in str(tigon.patch(model))
    assert_same_step(model, stock, batch)
