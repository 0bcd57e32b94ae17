"""Patched models in FP8, whose norms find the maxima of gradients that layers quantise. The kernels run."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import tigon
from fp8_passes import FIND_MAXIMA, record_passes
from tigon.hf import fp8
from tigon.recognition.parts.norm_recipes import RMSNormRecipe
from tigon.recognition.replacement import find_replacement
from tigon.runtime.device import INTERPRETED

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.kernels

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPE = torch.float16 if DEVICE == "cpu" else torch.bfloat16
TOKENS, HIDDEN = 9, 64
CONFIG = {"head_dim": 16, "attention_bias": False, "mlp_bias": False}


@pytest.fixture(autouse=True)
def _any_width(monkeypatch):
    monkeypatch.setattr(fp8, "NARROWEST", 1)


@pytest.fixture
def count_passes(monkeypatch):
    """Return a function that trains a step, and counts the passes that find maxima of matrices [TOKENS, HIDDEN]."""
    shapes = record_passes(monkeypatch, FIND_MAXIMA)

    def count(model: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
        shapes.clear()
        ids = torch.arange(3, 3 + TOKENS, device=DEVICE).view(1, -1)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss * 64).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach()} | gradients, shapes.count((TOKENS, HIDDEN))

    return count


def _norms(model: nn.Module) -> list:
    """Return the replacements of the RMS norms of a model."""
    replacements = filter(None, map(find_replacement, model.modules()))
    return [each for each in replacements if isinstance(each.recipe, RMSNormRecipe)]


def _patch_both(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """Patch a model and a copy of it, in which no norm finds maxima."""
    other = copy.deepcopy(model)
    for each in (model, other):
        tigon.patch(each, **options)
    for each in _norms(other):
        each.recipe = replace(each.recipe, finds_maximum=False)
    return model, other


def _assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# The passes over [TOKENS, HIDDEN] for each of two layers: the inputs of query, key and value, of the output projection,
# and of gate and up; the gradients of the output projection, of down, and of the queries. The norms find the maxima of
# the first two gradients, except that of the last layer's down, which comes from a norm outside of the decoder layers.
CASES = {
    "llama": ("llama", {}, 12, 9),
    "lean+mlp": ("llama", {"memory": "lean+mlp"}, 20, 17),
    # These norms follow the linear layers.
    "gemma2": ("gemma2", {}, 12, 8),
}
PARAMETERS = [pytest.param(*case, id=name, marks=pytest.mark.thorough) for name, case in CASES.items()]
PARAMETERS[0] = pytest.param(*CASES["llama"], id="llama")


@pytest.mark.parametrize(("model_type", "options", "count_before", "count"), PARAMETERS)
def test_steps_have_the_same_bits_and_fewer_passes(make_model, count_passes, model_type, options, count_before, count):
    model, other = _patch_both(make_model(model_type, DTYPE, **CONFIG).to(DEVICE), fp8="tensorwise", **options)
    (actual, passes), (expected, passes_before) = count_passes(model), count_passes(other)
    assert (passes_before, passes) == (count_before, count)
    _assert_equal(actual, expected)


def test_only_norms_of_layers_in_tensorwise_fp8_find_maxima(make_model):
    model = make_model("llama", DTYPE, num_hidden_layers=1, **CONFIG)
    for fp8_recipe, count in ((None, 0), ("rowwise", 0), ("tensorwise", 2)):
        report = tigon.patch(model, fp8=fp8_recipe)
        assert sum(each.recipe.finds_maximum for each in _norms(copy.deepcopy(model))) == count
        report.restore()
        assert not _norms(model)
    # A later patch with FP8 adds it to norms of an earlier one, and takes it away again.
    tigon.patch(model)
    report = tigon.patch(model, fp8="tensorwise")
    assert sum(each.recipe.finds_maximum for each in _norms(model)) == 2
    report.restore()
    assert not any(each.recipe.finds_maximum for each in _norms(model))
