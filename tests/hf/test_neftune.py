"""NEFTune adds noise to the outputs of a module by a forward hook. A patched model trains on the noise of a stock one.

The trainers of transformers and TRL register this hook on the embedding of the tokens, before or after the patch.
"""

import pytest
import torch
from torch import nn

import tigon
from op_cases import one_in

neftune = pytest.importorskip("transformers.integrations.neftune")

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


INSIDE = ("mlp.up_proj", "input_layernorm", "self_attn.q_proj")


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


@pytest.mark.filterwarnings("ignore:tigon. LlamaDecoderLayer is not checkpointed", "ignore:tigon. the head of")
@one_in(
    5,
    name=["model.embed_tokens", "lm_head", *(f"model.layers.0.{part}" for part in INSIDE)],
    hook_is_first={"hook, patch": True, "patch, hook": False},
    memory=["default", "lean+mlp", "checkpoint"],
)
def test_noise_is_that_of_a_stock_model(make_model, memory, hook_is_first, name):
    """A recomputation must not draw other noise, and neither a fused op nor the loss in the head may skip the hook."""
    stock, model = make_model(), make_model()
    add_noise(stock.get_submodule(name))
    if hook_is_first:
        add_noise(model.get_submodule(name))
    report = tigon.patch(model, memory=memory)
    if not hook_is_first:
        add_noise(model.get_submodule(name))
    (entry,) = [entry for entry in report.entries if entry.part == "loss"]
    assert entry.replaced == (name != "lm_head" or not hook_is_first)
    check_same_step(model, stock)
    assert run_step(make_model())[0] != run_step(stock)[0], "the noise changes the loss"
