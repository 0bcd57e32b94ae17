"""NEFTune adds noise to the outputs of a module by a forward hook. A patched model trains on the noise of a stock one.

The trainers of transformers and TRL register this hook on the embedding of the tokens, before or after the patch.
"""

import copy

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
neftune = pytest.importorskip("transformers.integrations.neftune")

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


@pytest.fixture(scope="module")
def stock_model() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def add_noise(module: nn.Module) -> None:
    """Register the hook as `activate_neftune` does, on a module that need not be the embedding."""
    module.neftune_noise_alpha = 5.0
    module.register_forward_hook(neftune.neftune_post_forward_hook)


def run_step(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and the gradients of one step. The noise has the same seed in each step."""
    tokens = torch.arange(16).reshape(2, 8) % 7
    torch.manual_seed(1)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def check_same_step(model: nn.Module, stock_model: nn.Module) -> None:
    loss, gradients = run_step(model)
    stock_loss, stock_gradients = run_step(stock_model)
    torch.testing.assert_close(loss, stock_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, stock_gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", ["default", "lean+mlp", "checkpoint"])
@pytest.mark.parametrize("hook_is_first", [True, False], ids=["hook, patch", "patch, hook"])
@pytest.mark.sampled(2)
def test_noise_on_the_embedding_is_that_of_a_stock_model(stock_model, memory, hook_is_first):
    stock, model, without_noise = (copy.deepcopy(stock_model) for _ in range(3))
    neftune.activate_neftune(stock, 5.0)
    if hook_is_first:
        neftune.activate_neftune(model, 5.0)
    report = tigon.patch(model, memory=memory)
    if not hook_is_first:
        neftune.activate_neftune(model, 5.0)
    assert "loss" in [entry.part for entry in report.replaced]
    check_same_step(model, stock)
    assert run_step(without_noise)[0] != run_step(stock)[0], "the noise changes the loss"


def test_noise_on_the_head_before_the_patch_keeps_the_loss_stock(stock_model):
    """The loss in the head has no logits to which the hook could add noise."""
    stock, model = copy.deepcopy(stock_model), copy.deepcopy(stock_model)
    add_noise(stock.lm_head)
    add_noise(model.lm_head)
    (entry,) = [entry for entry in tigon.patch(model).left_alone if entry.part == "loss"]
    assert "a hook on its head (by transformers.integrations.neftune) may change the logits" in entry.detail
    check_same_step(model, stock)


def test_noise_on_the_head_after_the_patch_makes_the_loss_stock(stock_model):
    stock, model = copy.deepcopy(stock_model), copy.deepcopy(stock_model)
    tigon.patch(model)
    add_noise(stock.lm_head)
    add_noise(model.lm_head)
    with pytest.warns(UserWarning, match="the head of LlamaForCausalLM was changed, so the stock code"):
        check_same_step(model, stock)


@pytest.mark.filterwarnings("ignore:tigon. LlamaDecoderLayer is not checkpointed")
@pytest.mark.parametrize("memory", ["default", "lean+mlp", "checkpoint"])
@pytest.mark.parametrize("name", ["mlp.up_proj", "input_layernorm", "self_attn.q_proj"])
@pytest.mark.sampled(2)
def test_noise_inside_a_layer_is_that_of_a_stock_model(stock_model, memory, name):
    """A recomputation must not draw other noise, and a fused op must not skip the hook."""
    stock, model = copy.deepcopy(stock_model), copy.deepcopy(stock_model)
    tigon.patch(model, memory=memory)
    for each in (stock, model):
        add_noise(each.model.layers[0].get_submodule(name))
    check_same_step(model, stock)
