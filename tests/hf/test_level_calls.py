"""At each memory level, generation, packed rows and the layers of a numbered level are right."""

import copy

import pytest
import torch

import tigon
from hf.test_level_switches import runs_of_layers
from tigon.memory.lean import recomputes_mlp

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("memory", ["checkpoint", "checkpoint+attention:1+offload:1"])
def test_generation_in_training_mode_gives_the_tokens_of_stock(make_model, batch, memory):
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    tokens = batch["input_ids"][:1]
    model = make_model("gemma2")
    expected = model.generate(tokens, **options)
    tigon.patch(model, memory=memory)
    assert torch.equal(model.generate(tokens, **options), expected)
    model.gradient_checkpointing_enable()
    model(**batch).loss.backward()
    assert torch.equal(model.generate(tokens, **options), expected)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_loop_without_gradients_has_its_cache_in_training_mode(make_model, batch, without_gradients):
    model, tokens = make_model(), batch["input_ids"]
    tigon.patch(model, memory="checkpoint")
    with without_gradients():
        expected = model(tokens).logits[:, -1]
        first = model(tokens[:, :-2])
        assert first.past_key_values.get_seq_length() == tokens.shape[1] - 2
        logits = model(tokens[:, -2:], past_key_values=first.past_key_values).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert runs_of_layers(model, batch) == [2, 1]


def test_a_filled_cache_is_refused_where_layers_would_ignore_it(make_model, batch):
    model, tokens = make_model(), batch["input_ids"]
    report = tigon.patch(model, memory="checkpoint")
    with torch.no_grad():
        cache = model(tokens[:, :5]).past_key_values
    with pytest.raises(ValueError, match="memory='checkpoint': .* must hold no tokens .*, got 5 tokens"):
        model(tokens[:, 5:], past_key_values=cache)
    model.eval()(tokens[:, 5:], past_key_values=copy.deepcopy(cache))
    model.train().gradient_checkpointing_disable()
    model(tokens[:, 5:], past_key_values=copy.deepcopy(cache))
    report.restore()
    model(tokens[:, 5:], past_key_values=copy.deepcopy(cache))


PACKED = torch.cat([torch.arange(5), torch.arange(6)]).expand(3, -1)


def call_with_names(model, tokens, **options):
    return model(tokens, position_ids=PACKED, labels=tokens, **options)


def call_in_order(model, tokens, **options):
    return model(tokens, None, PACKED, labels=tokens, **options)


def call_with_embeddings(model, tokens, **options):
    embeddings = model.get_input_embeddings()(tokens)
    return model(inputs_embeds=embeddings, position_ids=PACKED, labels=tokens, **options)


@pytest.mark.parametrize(
    ("model_type", "call"), [("gemma2", call_with_names), ("llama", call_in_order), ("qwen3", call_with_embeddings)]
)
@pytest.mark.sampled(2)
def test_packed_rows_have_the_loss_of_stock_at_every_level(make_model, batch, model_type, call):
    """Without a mask, transformers looks for packed documents only if there is no cache."""
    tokens, stock = batch["input_ids"], make_model(model_type)
    expected = {use_cache: call(stock, tokens, use_cache=use_cache).loss for use_cache in (True, False, None)}
    assert expected[True] == expected[None]
    assert (expected[True] - expected[False]).abs() > 1e-3
    for memory in ("lean", "checkpoint+attention"):
        model = make_model(model_type)
        tigon.patch(model, memory=memory)
        for use_cache, loss in expected.items():
            torch.testing.assert_close(call(model, tokens, use_cache=use_cache).loss, loss, rtol=1e-5, atol=1e-5)


def layers_that_recompute(model, batch) -> list[bool]:
    """Return, for each layer, whether its MLP recomputes the gate and up projections."""
    flags: list[bool] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_: flags.append(recomputes_mlp())) for layer in model.model.layers
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return flags


def test_the_first_layers_recompute_their_projections(make_model, batch, assert_same_step):
    """A later level replaces that of the layers."""
    model = make_model(num_hidden_layers=3)
    report = tigon.patch(model, memory="lean+mlp:2")
    assert "lean+mlp:2: backward recomputes" in str(report)
    assert "in the first 2 layers also those of the gate and up projections" in str(report)
    assert layers_that_recompute(model, batch) == [True, True, False]
    assert_same_step(model, make_model(num_hidden_layers=3), batch)
    for memory, flags in (("lean+mlp:1", [True, False, False]), ("lean", [False] * 3), ("lean+mlp", [True] * 3)):
        tigon.patch(model, memory=memory)
        assert layers_that_recompute(model, batch) == flags
    with pytest.raises(ValueError, match=r"memory='lean\+mlp:4' is not possible .*: it has 3 layers"):
        tigon.patch(model, memory="lean+mlp:4")
