"""Patched models in FP8, whose norms find the maxima of what the linear layers quantise. The kernels run."""

import copy

import pytest
import torch
from torch import nn

import tigon
from fp8_passes import FIND_MAXIMA, WRITE_COPIES, record_passes
from hf.fp8_steps import with_lora
from tigon.hf import fp8
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
    """Return a function that runs a function and counts the passes over matrices [TOKENS, HIDDEN].

    By default it counts the passes that find maxima, and with `WRITE_COPIES` those that write FP8 copies.
    """
    shapes = {name: record_passes(monkeypatch, name) for name in (FIND_MAXIMA, WRITE_COPIES)}

    def count(run, name=FIND_MAXIMA):
        shapes[name].clear()
        return run(), shapes[name].count((TOKENS, HIDDEN))

    return count


def _step(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 3 + TOKENS, device=DEVICE).view(1, -1)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    (loss * 64).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def _forget(model: nn.Module) -> None:
    """Let the norms of a model find no maxima, as before their readers existed."""
    for each in filter(None, map(find_replacement, model.modules())):
        each.requests = None


# The passes over [TOKENS, HIDDEN] for each of two layers: the inputs of query, key and value, of the output projection,
# and of gate and up; the gradients of the output projection, of down, and of the queries. The norms find the maxima of
# all but those of the attention, and the last layer's gradient of down comes from a norm outside of the decoder layers.
CASES = {"llama": ("llama", "tensorwise", {}, 12, 5)}
THOROUGH = {
    # Each layer quantises its input by itself, and reads the same maxima as the others. Autograd adds the gradient of
    # the residual to that of a norm, so no norm writes the gradients that the layers quantise.
    "llama, no fused statements": ("llama", "tensorwise", {"fused_statements": False, "glu": False}, 18, 8),
    "llama, rowwise, lean": ("llama", "rowwise", {"memory": "lean"}, 12, 5),
    # These norms follow the linear layers too.
    "gemma2": ("gemma2", "tensorwise", {}, 12, 4),
    "llama, lean+mlp": ("llama", "tensorwise", {"memory": "lean+mlp"}, 20, 7),
    "llama, rowwise": ("llama", "rowwise", {}, 12, 5),
    "qwen3": ("qwen3", "tensorwise", {}, 12, 5),
}
PARAMETERS = [pytest.param(*case, id=name) for name, case in CASES.items()]
PARAMETERS += [pytest.param(*case, id=name, marks=pytest.mark.thorough) for name, case in THOROUGH.items()]


@pytest.mark.parametrize(("model_type", "recipe", "options", "count_before", "count"), PARAMETERS)
def test_steps_have_the_same_bits_and_fewer_passes(
    make_model, count_passes, model_type, recipe, options, count_before, count
):
    model = make_model(model_type, DTYPE, **CONFIG).to(DEVICE)
    other = copy.deepcopy(model)
    for each in (model, other):
        tigon.patch(each, fp8=recipe, **options)
    _forget(other)
    expected, passes = count_passes(lambda: _step(other))
    assert passes == count_before
    for expected_passes in (count_before, count, count):
        actual, passes = count_passes(lambda: _step(model))
        assert passes == expected_passes
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


def test_a_copy_learns_and_restore_ends_it(make_model, count_passes):
    model = make_model("llama", DTYPE, num_hidden_layers=1, **CONFIG).to(DEVICE)
    report = tigon.patch(model, fp8="tensorwise")
    _step(model)
    _, count = count_passes(lambda: _step(model))
    clone = copy.deepcopy(model)
    assert count_passes(lambda: _step(clone))[1] > count
    assert count_passes(lambda: _step(clone))[1] == count
    replacements = [each for each in map(find_replacement, model.modules()) if each is not None]
    assert sum(each.requests is not None for each in replacements) == 2
    report.restore()
    assert not any(each.requests is not None for each in replacements)


def test_models_without_fp8_find_nothing(make_model):
    model = make_model("llama", DTYPE, num_hidden_layers=1, **CONFIG)
    tigon.patch(model)
    assert all(each.requests is None for each in map(find_replacement, model.modules()) if each is not None)


def test_an_fp8_base_of_adapters_has_the_same_bits(make_model, count_passes):
    model = with_lora(make_model("llama", DTYPE, **CONFIG)).to(DEVICE, DTYPE)
    other = copy.deepcopy(model)
    for each in (model, other):
        tigon.patch(each, fp8="tensorwise")
    _forget(other)
    expected, count_before = count_passes(lambda: _step(other), WRITE_COPIES)
    _step(model)
    actual, count = count_passes(lambda: _step(model), WRITE_COPIES)
    # No passes are left but those over the inputs of the output projection, the gradient of the last layer's down, and
    # the gradient of the second layer's queries. The input of the first layer needs no gradient.
    assert (count_before, count) == (11, 4)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
