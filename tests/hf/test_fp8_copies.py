"""When the FP8 copy of a frozen weight is used again: never after a write that a training library makes."""

import copy

import pytest
import torch
from torch import Tensor, nn

import tigon
from hf.changes import with_adapters
from tigon.hf import fp8
from tigon.recognition.parts.fp8 import FP8Recipe
from tigon.recognition.replacement import find_replacement

pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _any_width(monkeypatch):
    monkeypatch.setattr(fp8, "NARROWEST", 1)


@pytest.fixture
def model(make_model) -> nn.Module:
    """Return a model in fp16, whose products are right in the interpreter too."""
    return make_model("qwen3", torch.float16, num_hidden_layers=1).to(DEVICE)


@pytest.fixture
def run(batch):
    """Return run(model): the logits of one sequence."""
    tokens = batch["input_ids"][:1].to(DEVICE)
    return lambda model: model(input_ids=tokens).logits.detach()


def _patch(model: nn.Module):
    return tigon.patch(model, fp8="rowwise", loss=False, rms_norm=False, rope=False)


def _expected(model: nn.Module, run) -> Tensor:
    """Return the result of a model without copies: that of a copy of the model."""
    return run(copy.deepcopy(model))


def _recipes(model: nn.Module) -> list[FP8Recipe]:
    found = (getattr(find_replacement(each), "recipe", None) for each in model.modules())
    return [recipe for recipe in found if isinstance(recipe, FP8Recipe)]


def _bytes_of_copies(model: nn.Module) -> int:
    caches = [each.cache for recipe in _recipes(model) for each in recipe.caches.values()]
    return sum(cache.nbytes for cache in caches if cache is not None)


def test_another_adapter_that_is_merged_is_seen(model, run):
    model = with_adapters(model, r=8)
    _patch(model)
    run(model)
    model.merge_adapter()
    first = run(model)
    model.unmerge_adapter()
    # Load other adapters with equal settings.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(-3)
    model.merge_adapter()
    second = run(model)
    assert not torch.equal(first, second)
    assert torch.equal(second, _expected(model, run))


def test_a_merge_into_one_layer_of_a_group_is_seen(model, run):
    """Query, key and value share a cache, which is that of the query."""
    layer = model.model.layers[0].self_attn
    _patch(model)
    run(model.requires_grad_(False))
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules=["k_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    run(model)
    model = model.merge_and_unload()
    assert model.model.layers[0].self_attn is layer
    assert torch.equal(run(model), _expected(model, run))


def test_the_average_of_trained_weights_is_seen_after_a_step(model, run):
    """A teacher is a frozen model, and its weights are written through `data`."""
    _patch(model)
    model.requires_grad_(False)
    first = run(model)
    student = nn.Parameter(torch.ones(3, device=DEVICE))
    student.grad = torch.ones_like(student)
    torch.optim.SGD([student], lr=0.1).step()
    for parameter in model.model.layers.parameters():
        parameter.data.mul_(0.5)
    second = run(model)
    assert not torch.equal(first, second)
    assert torch.equal(second, _expected(model, run))


@pytest.mark.parametrize("of_copy", [False, True], ids=["", "of a copy"])
def test_clear_fp8_makes_any_write_visible(model, run, of_copy):
    report = _patch(model)
    model.requires_grad_(False)
    model = copy.deepcopy(model) if of_copy else model
    run(model)
    assert _bytes_of_copies(model) > 0
    for parameter in model.model.layers.parameters():
        parameter.data.mul_(0.5)
    report.clear_fp8(model) if of_copy else report.clear_fp8()
    assert _bytes_of_copies(model) == 0
    assert torch.equal(run(model), _expected(model, run))
