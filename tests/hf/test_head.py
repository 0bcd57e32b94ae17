"""The loss in the head gives the results of stock for every call of a model, and runs stock code where it must."""

import types

import numpy
import pytest
import torch
from torch import nn

import tigon
from tigon.hf.logits import SKIPPED_LOGITS

loss_utils = pytest.importorskip("transformers.loss.loss_utils")


def is_fused(outputs) -> bool:
    return outputs.logits is SKIPPED_LOGITS


# --- calls that are fused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"ignore_index": 5},
        {"shift_labels": torch.arange(33).view(3, 11)},
        {"shift_labels": torch.arange(33).view(3, 11), "num_items_in_batch": 9, "ignore_index": 4},
        {"label_smoothing": 0.3, "reduction": "sum"},
        {"output_hidden_states": True},
    ],
    ids=[
        "items int",
        "items tensor",
        "ignore_index",
        "shift_labels",
        "all three",
        "options that stock ignores",
        "hidden states",
    ],
)
def test_options_of_the_loss_work_as_in_stock(pair, batch, assert_same_step, extra):
    model, stock = pair("gemma2")
    if "ignore_index" in extra:
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, extra["ignore_index"])
    assert is_fused(model(**batch, **extra))
    assert_same_step(model, stock, {**batch, **extra})


def test_labels_may_be_passed_by_position(pair, batch):
    model, stock = pair()
    args = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    outputs = model(*args)
    assert is_fused(outputs)
    torch.testing.assert_close(outputs.loss, stock(*args).loss)


def test_outputs_have_the_form_of_stock(pair, batch):
    model, stock = pair()
    outputs, expected = model(**batch, output_hidden_states=True), stock(**batch, output_hidden_states=True)
    assert type(outputs) is type(expected)
    assert outputs.keys() == expected.keys()
    assert all(torch.equal(a, b) for a, b in zip(outputs.hidden_states, expected.hidden_states, strict=True))
    loss, logits, *rest = model(**batch, return_dict=False)
    assert logits is SKIPPED_LOGITS
    assert len(rest) == len(stock(**batch, return_dict=False)) - 2
    torch.testing.assert_close(loss, expected.loss)


def test_embeddings_may_be_the_input(pair, batch, assert_same_step):
    model, stock = pair()
    with torch.no_grad():
        inputs = stock.get_input_embeddings()(batch.pop("input_ids"))
    assert_same_step(model, stock, {**batch, "inputs_embeds": inputs})


def freeze_head(model):
    model.lm_head.requires_grad_(False)


def freeze_trunk(model):
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


def add_head_bias(model):
    model.lm_head.bias = nn.Parameter(torch.randn(model.lm_head.out_features))


@pytest.mark.parametrize("change", [freeze_head, freeze_trunk, add_head_bias])
def test_frozen_and_biased_heads_work_as_in_stock(pair, batch, assert_same_step, change):
    model, stock = pair(change=change)
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)


@pytest.mark.parametrize(
    ("model_type", "config", "detail"),
    [
        ("cohere", {"logit_scale": 0.3}, "scale 0.3"),
        ("granite", {"logits_scaling": 7.0}, "scale 0.142857"),
        ("gemma2", {"final_logit_softcapping": 5.0}, "softcap 5"),
        ("gemma2", {"final_logit_softcapping": None}, "in the head"),
        ("mamba", {}, "in the head"),
        ("mixtral", {"output_router_logits": True, "num_local_experts": 4}, "load_balancing_loss"),
    ],
    ids=["scale", "divisor", "soft cap", "no soft cap", "reads the dtype of its head", "router loss"],
)
@pytest.mark.sampled(2)
def test_scales_soft_caps_and_router_losses_work_as_in_stock(
    pair, make_model, batch, assert_same_step, model_type, config, detail
):
    model, stock = pair(model_type, **config)
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)
    entry = next(e for e in tigon.patch(make_model(model_type, **config)).replaced if e.part == "loss")
    assert entry.detail.endswith(detail)


def test_the_loss_is_zero_if_all_labels_are_ignored(pair, batch):
    model, _ = pair()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == 0.0
    assert not any(p.grad.any() for p in model.parameters())


def test_a_call_inside_a_call_has_its_own_loss(pair, batch, assert_same_step):
    model, stock = pair()
    inner = []

    def call_again(layer, args):
        if not inner:
            inner.append(None)
            inner[0] = model(batch["input_ids"]).logits, model(**batch).loss

    model.model.layers[0].register_forward_pre_hook(call_again)
    assert_same_step(model, stock, batch)
    assert torch.equal(inner[0][0], stock(batch["input_ids"]).logits)
    torch.testing.assert_close(inner[0][1], stock(**batch).loss)


# --- hooks and shards ----------------------------------------------------------------------------


def as_hook_of_torch(hook):
    """Return a hook that seems to be written in torch.distributed, whose hooks change no values."""
    namespace = {**hook.__globals__, "__name__": "torch.distributed"}
    return types.FunctionType(hook.__code__, namespace, closure=hook.__closure__)


def test_the_weight_of_the_head_is_read_only_in_a_call_of_the_head(pair, batch, step):
    model, stock = pair()
    head, weight = model.lm_head, model.lm_head.weight.detach().clone()
    expected = step(stock, batch)

    def gather(module, args):
        module.weight.data = weight

    def shard(module, args, output):
        module.weight.data = torch.full_like(weight, torch.nan)

    shard(head, (), None)
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(as_hook_of_torch(shard))
    assert is_fused(model(**batch))
    actual = step(model, batch)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)


def test_backward_reaches_the_output_of_the_head_before_its_weights(pair, batch):
    """A sharding engine gathers the weight of the head for backward in a hook of the output."""
    model, _ = pair()
    order = []

    def gather_for_backward(module, args, output):
        output.register_hook(lambda gradient: order.append("output"))

    model.lm_head.register_forward_hook(as_hook_of_torch(gather_for_backward))
    model.lm_head.weight.register_hook(lambda g: order.append("weight"))
    model(**batch).loss.backward()
    assert order == ["output", "weight"]


# --- calls that stay stock -----------------------------------------------------------------------


def test_evaluation_is_stock(pair, batch):
    model, stock = pair("gemma2")
    outputs, expected = model.eval()(**batch), stock.eval()(**batch)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)
    assert is_fused(model.train()(**batch))


def test_training_without_labels_returns_logits(pair, batch):
    model, stock = pair()
    del batch["labels"]
    assert torch.equal(model(**batch).logits, stock(**batch).logits)
    shifted = {**batch, "shift_labels": batch["input_ids"]}
    assert model(**shifted).loss is stock(**shifted).loss is None


@pytest.mark.parametrize("logits_to_keep", [4, torch.tensor([7, 8, 9, 10])], ids=["int", "indices"])
def test_logits_to_keep_returns_these_logits(pair, batch, logits_to_keep):
    model, stock = pair()
    batch["labels"] = batch["labels"][:, -4:]
    outputs, expected = model(**batch, logits_to_keep=logits_to_keep), stock(**batch, logits_to_keep=logits_to_keep)
    assert outputs.logits.shape[1] == 4
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)


def test_the_loss_is_stock_if_shift_labels_have_no_batch_dimension(pair, batch):
    model, stock = pair()
    batch["shift_labels"] = torch.arange(33)
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


@pytest.mark.parametrize("items", [torch.tensor([3.0, 4.0]), numpy.int64(3)], ids=["two", "numpy"])
def test_the_loss_is_stock_if_the_number_of_items_is_no_single_number(pair, batch, items):
    model, stock = pair()
    assert torch.equal(model(**batch, num_items_in_batch=items).loss, stock(**batch, num_items_in_batch=items).loss)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_generation_is_stock(pair, batch, training):
    model, stock = pair("gemma")
    options = {"max_new_tokens": 5, "do_sample": False}
    prompt = {name: batch[name][:1] for name in ("input_ids", "attention_mask")}
    tokens = model.train(training).generate(**prompt, **options)
    assert torch.equal(tokens, stock.train(training).generate(**prompt, **options))


def test_errors_are_those_of_stock_and_have_no_later_effect(pair, batch):
    model, stock = pair()
    wrong = {**batch, "labels": batch["labels"][:, :5]}
    for each in (model, stock):
        with pytest.raises(ValueError, match="batch_size"):
            each(**wrong)
    with pytest.raises(IndexError):
        model(torch.full_like(batch["input_ids"], 999), labels=batch["labels"])
    del batch["labels"]
    assert torch.equal(model(**batch).logits, stock(**batch).logits)


# --- changes after the patch ---------------------------------------------------------------------


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, like those of adapter libraries."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 3, bias=False), nn.Linear(3, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_an_adapter_that_is_added_to_the_head_later_is_not_ignored(pair, batch, assert_same_step):
    model, stock = pair()
    for each in (model, stock):
        torch.manual_seed(0)
        each.lm_head = Adapter(each.lm_head)
    assert model(**batch).logits is not SKIPPED_LOGITS
    assert_same_step(model, stock, batch)


def test_adapters_on_other_layers_are_called(pair, batch, assert_same_step):
    model, stock = pair()
    for each in (model, stock):
        torch.manual_seed(0)
        mlp = each.model.layers[0].mlp
        mlp.gate_proj, mlp.down_proj = Adapter(mlp.gate_proj), Adapter(mlp.down_proj)
    assert_same_step(model, stock, batch)


def test_a_model_that_passes_other_arguments_to_its_loss_raises(pair, batch):
    model, _ = pair()
    fused = model.loss_function
    # The same object was assigned again, so the loss is fused.
    model.loss_function = fused
    stock_forward = type(model).forward

    class Meddling(type(model)):
        def forward(self, *args, num_items_in_batch=None, **kwargs):
            return stock_forward(self, *args, num_items_in_batch=99, **kwargs)

    model.__class__ = Meddling
    with pytest.raises(RuntimeError, match="other arguments than the model itself received"):
        model(**batch, num_items_in_batch=3)


# --- models whose loss stays stock, and why ------------------------------------------------------


def reason_for_stock_loss(model) -> str:
    entries = [e for e in tigon.patch(model).entries if e.part == "loss"]
    assert [e.replaced for e in entries] == [False]
    return entries[0].detail


def variant(model, change):
    """Change a model so that it applies `change` to its logits before its loss."""
    stock_forward = type(model).forward

    class Variant(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            outputs = stock_forward(self, *args, **kwargs)
            outputs.logits = change(outputs.logits)
            if labels is not None:
                outputs.loss = self.loss_function(outputs.logits, labels, self.config.vocab_size, **kwargs)
            return outputs

    model.__class__ = Variant
    return model


def one_entry(logits):
    logits = logits.clone()
    logits[..., 100] = -1e9
    return logits


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1e-3,
        lambda x: x.clamp(-40, 40),
        lambda x: x * x.abs().mean(),
        lambda x: -x,
        one_entry,
        lambda x: 20 * torch.tanh(x / 20 + x**3),
        lambda x: torch.cat((x[..., 1:], x[..., :1]), -1),
    ],
    ids=["shift", "clamp", "depends on values", "sign", "one entry", "another curve", "permuted"],
)
def test_the_loss_is_stock_if_the_change_of_the_logits_is_not_understood(make_model, batch, step, clone, change):
    model = variant(make_model(), change)
    before = step(clone(model), batch)
    assert reason_for_stock_loss(model) in (
        "its forward does more to the logits than a scale and a soft cap",
        "its forward changes the logits in a different way each time",
    )
    assert torch.equal(step(model, batch)["loss"], before["loss"])


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda x: x / 3, "scale 0.333333"),
        (lambda x: 8 * torch.tanh(x / 12), "scale 0.666667, softcap 8"),
        (lambda x: 1.5 * (9 * torch.tanh(x / 9)).float(), "scale 1.5, softcap 13.5"),
    ],
    ids=["divisor", "two sizes", "a scale after the cap"],
)
def test_a_known_change_of_the_logits_is_fused_in_any_forward(
    make_model, batch, assert_same_step, clone, change, detail
):
    model = variant(make_model(), change)
    stock = clone(model)
    assert detail in str(tigon.patch(model))
    assert_same_step(model, stock, batch)


def test_a_scale_that_is_trained_stays_stock(make_model):
    model = make_model()
    model.temperature = nn.Parameter(torch.tensor(2.0))
    variant(model, lambda x, model=model: x)
    original = type(model).forward

    class Scaled(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            outputs = original(self, *args, **kwargs)
            outputs.logits = outputs.logits * self.temperature.abs()
            if labels is not None:
                outputs.loss = self.loss_function(outputs.logits, labels, self.config.vocab_size, **kwargs)
            return outputs

    model.__class__ = Scaled
    assert reason_for_stock_loss(model) == "its forward changes the logits in a different way each time"


def test_a_scale_in_a_buffer_stays_stock(make_model):
    model = make_model()
    model.register_buffer("temperature", torch.ones(()))
    variant(model, lambda x, model=model: x * model.temperature)
    original = type(model).forward

    class Scaled(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            outputs = original(self, *args, **kwargs)
            outputs.logits = outputs.logits * self.temperature
            if labels is not None:
                outputs.loss = self.loss_function(outputs.logits, labels, self.config.vocab_size, **kwargs)
            return outputs

    model.__class__ = Scaled
    assert reason_for_stock_loss(model) == "its forward changes the logits in a different way each time"


def in_transformers(source: str):
    """Return a loss function that seems to be written in transformers."""
    namespace = dict(vars(loss_utils))
    exec(source, namespace)
    return namespace["loss"]


def test_another_loss_of_transformers_stays_stock(make_model):
    model = make_model()
    model.loss_function = in_transformers(
        "def loss(logits, labels, vocab_size, **kwargs):\n"
        "    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))"
    )
    assert "its loss is not the standard loss" in reason_for_stock_loss(model)


def test_a_standard_loss_with_another_option_is_fused_in_calls_without_it(make_model, batch, clone):
    model = make_model()
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


def test_a_head_that_is_more_than_a_linear_layer_stays_stock(make_model):
    class Normalised(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, nn.functional.normalize(self.weight))

    model = make_model()
    model.lm_head.__class__ = Normalised
    assert reason_for_stock_loss(model) == "its head (Normalised) is not a plain linear layer"


def test_a_forward_of_another_library_stays_in_place(make_model):
    model = make_model()
    model.forward = lambda **kwargs: None
    assert "its forward was already replaced (by" in reason_for_stock_loss(model)


def test_a_head_of_another_library_stays_in_place(make_model):
    model = make_model()
    model.lm_head.forward = lambda x: x
    assert reason_for_stock_loss(model).startswith("Linear: its forward was already replaced (by")
