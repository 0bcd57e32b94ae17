"""Patched models train as stock where kernels run: on a GPU or in the interpreter.

Only kernels compute the norms of queries and keys together with the rotary embedding, and the adapters of a layer in
FP8. `tests/recognition/test_head_norms.py` has the forms of forwards.
"""

import copy

import pytest
import torch
from torch import nn

import tigon
from hf.changes import with_adapters
from hf.fp8_steps import assert_near, layers_in_fp8
from hf.same_step import assert_same
from hf.same_step import step as step_with
from hf.tiny import tiny_model
from op_cases import DEVICE
from tigon.hf import fp8
from tigon.ops.adapters.fp8_weight import Fp8Operand
from tigon.recognition.parts import rope as rope_recognition

pytestmark = pytest.mark.kernels


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Record the arguments of each call of the op for norms of heads and rotary embeddings."""
    arguments: list[tuple] = []
    op = rope_recognition.qk_norm_rope_of_layer
    monkeypatch.setattr(rope_recognition, "qk_norm_rope_of_layer", lambda *a, **k: arguments.append(a) or op(*a, **k))
    return arguments


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of one short sequence, because the interpreter is slow."""
    tokens = torch.arange(3, 7, device=DEVICE)[None]
    return step_with(model, {"input_ids": tokens, "labels": tokens, "use_cache": False})


def with_lora(model: nn.Module) -> nn.Module:
    return with_adapters(model, ["q_proj", "k_proj"])


# The model type, the level of memory, the number of calls of the op in forward, and what is added before the patch. One
# layer of two has no rotary embedding in EXAONE 4.
CASES = {
    "all parts": ("gemma2", "default", 0, None),
    "norms of heads": ("qwen3", "default", 2, None),
    "lean": ("qwen3", "lean", 2, None),
    "checkpoint": ("qwen3", "checkpoint", 2, None),
    "Gemma 3": ("gemma3_text", "default", 2, None),
    "EXAONE 4": ("exaone4", "default", 1, None),
    "adapters": ("qwen3", "default", 2, with_lora),
}


@pytest.mark.parametrize(("model_type", "level", "count", "add"), CASES.values(), ids=CASES)
@pytest.mark.sampled(in_interpreter=3)
def test_models_train_as_stock(model_type, level, count, add, calls):
    stock = tiny_model(model_type).to(DEVICE)
    stock = stock if add is None else add(stock)
    model = copy.deepcopy(stock)
    report = tigon.patch(model, memory=level)
    assert any("q/k norm + rope" in entry.detail for entry in report.replaced) == (count > 0)
    expected = step(stock)
    assert_same(step(model), expected, tolerance=1e-4)
    # A level other than the default computes the op again in backward.
    assert len(calls) == count or (level != "default" and len(calls) > count)
    calls.clear()
    report.restore()
    assert all(torch.equal(value, expected[name]) for name, value in step(model).items())
    assert not calls


@pytest.fixture
def adapted(make_model, monkeypatch) -> nn.Module:
    """Return a model of one layer with adapters. Products in fp16 are right in the interpreter too."""
    monkeypatch.setattr(fp8, "NARROWEST", 1)
    return with_adapters(make_model("qwen3", torch.float16, **SMALL).to(DEVICE), r=8)


SMALL = {"num_hidden_layers": 1, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2}


def patch_in_fp8(model: nn.Module):
    return tigon.patch(model, fp8="rowwise", loss=False, rms_norm=False, rope=False)


def test_the_nodes_of_adapters_compute_the_products_in_fp8(adapted, monkeypatch):
    counts, products = [], Fp8Operand.products
    monkeypatch.setattr(Fp8Operand, "products", lambda self: counts.append(len(self.group.weights)) or products(self))
    stock = copy.deepcopy(adapted)
    assert len(layers_in_fp8(patch_in_fp8(adapted))) == 7
    assert_near(step(adapted), step(stock))
    # Query, key and value are one node, and so are the layers of the MLP, whose last one has an input of its own.
    assert counts == [3, 1, 2, 1]


def test_the_base_of_adapters_is_quantised_once_and_again_after_a_merge(adapted, quantisations):
    """Without gradients, no transposed copy is made."""
    patch_in_fp8(adapted)
    tokens = torch.arange(3, 9, device=DEVICE)[None]
    run = lambda model: model(input_ids=tokens).logits.detach()
    run(adapted)
    assert len(quantisations) == 4
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()
    run(adapted)
    assert len(quantisations) == 4
    adapted.merge_adapter()
    run(adapted)
    adapted.unmerge_adapter()
    quantisations.clear()
    assert torch.equal(run(adapted), run(copy.deepcopy(adapted)))
    assert len(quantisations) == 8
    quantisations.clear()
    with torch.no_grad():
        run(copy.deepcopy(adapted))
    assert set(quantisations) == {(True, False)}
