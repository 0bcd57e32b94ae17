"""Models that normalise queries and keys train as stock while one op computes these norms and the rotary embedding.

Only kernels do so, in the interpreter or on a GPU. `tests/recognition/test_head_norms.py` has the forms of forwards.
"""

import copy

import pytest
import torch
from torch import nn

import tigon
from hf.tiny import tiny_model
from op_cases import DEVICE
from tigon.recognition.parts import rope as rope_recognition

pytestmark = pytest.mark.kernels


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Record the arguments of each call of the op."""
    arguments: list[tuple] = []
    op = rope_recognition.qk_norm_rope
    monkeypatch.setattr(rope_recognition, "qk_norm_rope", lambda *a, **k: arguments.append(a) or op(*a, **k))
    return arguments


def make(model_type: str) -> nn.Module:
    """Return a tiny model whose norms have random weights."""
    torch.manual_seed(0)
    model = tiny_model(model_type).to(DEVICE)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.train()


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients."""
    model.zero_grad()
    tokens = torch.arange(3, 9, device=DEVICE)[None]
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_close(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(value.abs().max().item(), 1e-3)
        torch.testing.assert_close(
            results[name], value, atol=1e-4 * scale, rtol=0, msg=lambda text, n=name: f"{n} {text}"
        )


@pytest.mark.parametrize("level", ["default", "lean", "checkpoint"])
def test_every_level_trains_as_stock(level, calls):
    stock = make("qwen3")
    model = copy.deepcopy(stock)
    report = tigon.patch(model, glu=False, loss=False, memory=level)
    assert any("q/k norm + rope" in e.detail and e.count == 2 for e in report.replaced)
    expected = step(stock)
    assert_close(step(model), expected)
    # A level other than the default computes the op again in backward.
    assert len(calls) >= 2
    calls.clear()
    report.restore()
    assert all(torch.equal(value, expected[name]) for name, value in step(model).items())
    assert not calls


@pytest.mark.parametrize("model_type", ["gemma3_text", "exaone4"])
def test_other_types_train_as_stock(model_type, calls):
    stock = make(model_type)
    model = copy.deepcopy(stock)
    tigon.patch(model, glu=False, loss=False)
    assert_close(step(model), step(stock))
    # One layer of two has no rotary embedding in EXAONE 4.
    assert len(calls) == (1 if model_type == "exaone4" else 2)


def test_adapters_on_queries_and_keys_train_as_stock(calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    stock = peft.get_peft_model(make("qwen3"), config)
    model = copy.deepcopy(stock)
    tigon.patch(model, glu=False, loss=False)
    assert_close(step(model), step(stock))
    assert len(calls) == 2
