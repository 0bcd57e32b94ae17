"""With scaled losses in fp16, and offloaded or recomputed activations, the gradients are those of the stock model."""

import pytest
import torch

import tigon
from hf.ways import assert_same


# Gemma 2 has every part, a soft cap and a scale of its embeddings.
@pytest.fixture(params=["gemma2", pytest.param("llama", marks=pytest.mark.thorough)])
def model_type(request) -> str:
    return request.param


def scaled_step(model, batch, scale: float) -> tuple[dict[str, torch.Tensor], torch.amp.GradScaler, torch.optim.SGD]:
    """Return the loss with the unscaled gradients by name, the scaler, and the optimizer."""
    model.zero_grad()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=scale), torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.float16):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}, scaler, optimizer


@pytest.mark.parametrize("items", [27, 10**7], ids=["small mean", "large mean"])
def test_a_scaled_loss_in_fp16_is_as_accurate_as_stock(make_model, model_type, batch, step, items):
    """Without the scale, the gradients of a mean of 10^7 items would be zero in fp16."""
    batch["num_items_in_batch"] = torch.tensor(items)
    scale = 2.0 ** (items // 27).bit_length() * 64
    stock, model = make_model(model_type), make_model(model_type)
    tigon.patch(model)
    exact = step(make_model(model_type), batch)
    actual, *_ = scaled_step(model, batch, scale)
    expected, *_ = scaled_step(stock, batch, scale)
    assert actual.keys() == expected.keys() == exact.keys()
    for name, value in exact.items():
        size = value.abs().max()
        allowed = 2 * (expected[name] - value).abs().max() + 0.002 * size
        assert size > 0
        assert (actual[name] - value).abs().max() < allowed, name


def test_activations_are_saved_through_the_hooks_alone(make_model, model_type, batch, step):
    """The offloaded memory is free: overwriting it before backward changes nothing."""
    model, stock = make_model(model_type), make_model(model_type)
    tigon.patch(model)
    parameters = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    copies, originals = [], []

    def pack(x: torch.Tensor) -> int:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
            originals.append(x.detach())
            x = x.clone()
        copies.append(x.detach())
        return len(copies) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: copies[i]):
        loss = model(**batch).loss
    assert len(originals) > 20
    actual = {"loss": loss.detach().clone()}
    with torch.no_grad():
        for x in originals:
            x.fill_(torch.nan)
    loss.backward()
    actual |= {name: p.grad for name, p in model.named_parameters()}
    expected = step(stock, batch)
    assert_same(actual, expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_under_autocast_gives_the_same_bits(make_model, model_type, batch, step, reentrant):
    """Activations are recomputed in the same dtypes, so the bits are those without checkpointing."""
    model = make_model(model_type)
    tigon.patch(model)
    model.enable_input_require_grads()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, batch)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        actual = step(model, batch)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_the_graph_of_a_loss_may_be_retained(make_model, model_type, batch):
    """Two backward passes of one forward add twice the gradient."""
    model = make_model(model_type)
    tigon.patch(model)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], msg=name)
