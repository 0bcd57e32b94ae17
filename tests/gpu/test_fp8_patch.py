"""`tigon.patch(model, fp8=...)` on FP8 units: near bf16 and the emulation, without waits, in CUDA graphs."""

import copy

import pytest
import torch
import transformers
from torch import nn

import tigon
from gpu.steps import capture, no_waits
from hf.fp8_steps import BF16_ERROR, assert_near, error, layers_in_fp8
from tigon.hf import fp8
from tigon.ops.fp8.formats import RECIPES, has_units
from tigon.runtime.device import device_of


@pytest.fixture(autouse=True)
def _any_width(monkeypatch):
    if not has_units(device_of(torch.empty(0, device="cuda")).arch):
        pytest.skip("the GPU has no FP8 units")
    monkeypatch.setattr(fp8, "NARROWEST", 1)


def make_model(seed: int = 0) -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.cuda().train()


def make_batch(seed: int = 0, device: str = "cuda") -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 1024, (3, 131), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loss = model(**batch).loss
    loss.backward()
    results = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), **results}


@pytest.mark.parametrize("fp8_dw", [True, False], ids=["dW in FP8", "dW in bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_are_near_those_of_bf16(recipe, fp8_dw):
    model, stock = make_model(), make_model()
    report = tigon.patch(model, fp8=recipe, fp8_dw=fp8_dw)
    actual, expected = step(model, make_batch()), step(stock, make_batch())
    assert_near(actual, expected)
    for name in layers_in_fp8(report):
        assert error(actual[f"{name}.weight"], expected[f"{name}.weight"]) > BF16_ERROR, name


def test_a_step_does_not_wait_for_the_gpu():
    model = make_model()
    tigon.patch(model, fp8="tensorwise")
    batch = make_batch()
    step(model, batch)
    with no_waits():
        step(model, batch)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replayed_graph_quantises_the_weights_that_it_finds(recipe):
    model, other = make_model(), make_model(seed=1)
    tigon.patch(model, fp8=recipe)
    static = make_batch()

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(**static).loss
        loss.backward()
        return loss

    graph, loss = capture(run, warm_ups=3)
    for seed in (2, 3):
        if seed == 3:
            model.load_state_dict(other.state_dict())
        for name, value in make_batch(seed).items():
            static[name].copy_(value)
        graph.replay()
        replayed = {"loss": loss.detach().clone()}
        replayed |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        eager = copy.deepcopy(model)
        eager.zero_grad(set_to_none=True)
        expected = step(eager, make_batch(seed))
        assert error(replayed["loss"], expected["loss"]) < BF16_ERROR / 4
        name = "model.layers.0.mlp.up_proj.weight"
        assert error(replayed[name], expected[name]) < 4 * BF16_ERROR


def test_the_copies_of_the_weights_are_freed_at_a_level_of_memory():
    """At the default level they take two bytes for each weight, and at the level `lean` none after a step."""
    model = make_model()
    tigon.patch(model, fp8="tensorwise")
    # The first products allocate the workspaces of cuBLAS, which stay.
    step(model, make_batch())
    sizes = []
    for level in ("default", "lean"):
        model = make_model()
        report = tigon.patch(model, fp8="tensorwise", memory=level)
        count = sum(model.get_parameter(f"{name}.weight").numel() for name in layers_in_fp8(report))
        before = torch.cuda.memory_allocated()
        step(model, make_batch())
        torch.cuda.synchronize()
        sizes.append((torch.cuda.memory_allocated() - before) / count)
        del model, report
    assert 1.9 < sizes[0] < 2.3
    assert sizes[1] < 0.2


def test_a_graph_quantises_frozen_weights_at_each_replay():
    model = make_model().requires_grad_(False)
    report = tigon.patch(model, fp8="rowwise")
    batch = make_batch()
    with torch.no_grad():
        graph, loss = capture(lambda: model(**batch).loss)
    # The graph must not read copies that are freed, nor those of earlier values.
    report.clear_fp8()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(0.5)
    graph.replay()
    replayed = loss.clone()
    with torch.no_grad():
        expected = model(**batch).loss
    assert error(replayed, expected) < BF16_ERROR / 4
