"""Models with adapters of PEFT compute what they compute without Tigon, whatever happens to the adapters later."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from hf.lora_models import NAMES, TOKENS, build, make_llama, to_4bit, to_8bit, with_lora
from op_cases import DEVICE
from tigon.ops.adapters import lora
from tigon.ops.adapters.four_bit import FourBitWeight, dequantise
from tigon.recognition.parts import dequantisation
from tigon.recognition.replacement import find_replacement

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def dequantises_few_rows(monkeypatch):
    """The tests have few rows, for which quantised layers would compute their own products."""
    monkeypatch.setattr(dequantisation, "MIN_ROWS", 1)


def step(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the output, the gradient of the embeddings' output and all other gradients, by name."""
    model.zero_grad(set_to_none=True)
    embedded: list[Tensor] = []

    def detach_and_store(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = model.get_submodule("base_model.model.embed").register_forward_hook(detach_and_store)
    torch.manual_seed(5)
    y = model(tokens)
    handle.remove()
    y.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input": embedded[0].grad, **gradients}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def in_fp64(model: nn.Module) -> nn.Module:
    """Return a copy of a model in fp64, in which the layers of 4 bits are dense."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Linear4bit":
                from bitsandbytes.functional import dequantize_4bit

                layer = nn.Linear(child.in_features, child.out_features, child.bias is not None, DEVICE)
                layer.weight = nn.Parameter(dequantize_4bit(child.weight.data, child.weight.quant_state), False)
                layer.bias = child.bias
                setattr(module, name, layer)
    return model.double()


def assert_same_step(model: nn.Module, stock: nn.Module) -> None:
    """Assert that a model is not much further from a model in fp64 than a stock model, apart from one rounding.

    The rounding errors of two models differ, so the limit is three times the distance of the stock model.
    """
    tokens = TOKENS.to(DEVICE)
    with torch.autocast(torch.device(DEVICE).type, enabled=False):
        exact = step(in_fp64(stock), tokens)
    actual, expected = (step(each, tokens) for each in (model, stock))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        limit = 3 * distance(value, exact[name]) + 2**-8 * float(exact[name].norm())
        assert distance(actual[name], exact[name]) <= limit, name


@pytest.fixture
def nodes(monkeypatch) -> list[str]:
    """Return the names of the autograd nodes for adapters, in the order in which they are called."""
    from tigon.ops.adapters import lora_mlp

    names: list[str] = []

    def spy(node: type) -> None:
        apply = node.apply
        monkeypatch.setattr(node, "apply", staticmethod(lambda *args: (names.append(node.__name__), apply(*args))[1]))

    for node in (lora._LoRALinears, lora._AddAdapters, lora_mlp._LoRAGLUMLP):
        spy(node)
    return names


# Query, key and value are one node, the output projection is one, and the MLP is one.
FUSED = ["_LoRALinears", "_LoRALinears", "_LoRAGLUMLP"]
# The activation of an MLP lies between two nodes.
COMPOSED = ["_LoRALinears", "_LoRALinears", "_LoRALinears", "_LoRALinears"]

VARIANTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, FUSED),
    "rank-stabilised": ({"use_rslora": True}, FUSED),
    "bias": ({"lora_bias": True}, COMPOSED),
    "adapters in bf16": ({"autocast_adapter_dtype": False}, FUSED),
    "fp16": ({"dtype": torch.float16}, FUSED),
    "ranks by name": ({"rank_pattern": {"up_proj": 2, "v_proj": 3}, "alpha_pattern": {"q_proj": 1}}, FUSED),
    "few layers": ({"target_modules": ["q_proj", "down_proj"]}, ["_LoRALinears", "_LoRAGLUMLP"]),
    "up alone": ({"target_modules": ["up_proj"]}, ["_LoRAGLUMLP"]),
    "query and value": ({"target_modules": ["q_proj", "v_proj"]}, ["_LoRALinears"]),
    "query and key with biases": ({"target_modules": ["q_proj", "k_proj"], "lora_bias": True}, ["_LoRALinears"]),
    "modules_to_save": ({"modules_to_save": ["head"]}, FUSED),
    "trained biases": ({"bias": "all"}, FUSED),
    "DoRA": ({"use_dora": True}, []),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(in_interpreter=4)
def test_variants_of_lora_compute_what_stock_computes(variant, nodes):
    options, expected = VARIANTS[variant]
    stock = build(**options)
    model = copy.deepcopy(stock)
    report = tigon.patch(model)
    assert_same_step(model, stock)
    assert nodes == expected
    if variant == "DoRA":
        assert {entry.part for entry in report.left_alone} == {"adapters"}
        assert all("something else than a linear layer" in entry.detail for entry in report.left_alone)
    else:
        assert not report.left_alone


def _add(model: Any) -> None:
    torch.manual_seed(7)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=NAMES, init_lora_weights=False))
    model.to(DEVICE)


def test_a_mixed_batch_runs_stock(nodes):
    stock = build()
    _add(stock)
    model = copy.deepcopy(stock)
    tigon.patch(model, glu=False)
    names = ["default", "__base__", "second"]
    with torch.no_grad():
        actual, expected = (
            each.eval()(TOKENS.to(DEVICE), adapter_names=names) for each in (model, stock)
        )  # fmt: skip
    assert torch.equal(actual, expected)
    assert not nodes


to_bf16_4bit = functools.partial(to_4bit, dtype=torch.bfloat16)


def test_layers_of_8_bits_get_their_adapters_from_an_op(nodes):
    """A product in 8 bits also rounds its input, so no op computes it."""
    stock, model = (build(convert=to_8bit) for _ in range(2))
    report = tigon.patch(model)
    assert not report.left_alone
    actual, expected = (step(each, TOKENS.to(DEVICE)) for each in (model, stock))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert distance(actual[name], value) <= 0.05 * float(value.norm()), name
    assert nodes == ["_AddAdapters"] * len(NAMES)
    report.restore()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("agrees", [True, False])
def test_weights_of_4_bits_are_dequantised_by_a_kernel_that_agrees_with_their_library(agrees, nodes, monkeypatch):
    stock = build(convert=to_bf16_4bit)
    model = copy.deepcopy(stock)
    results = []

    def run(weight: FourBitWeight) -> torch.Tensor:
        dense = dequantise(weight)
        results.append(dense)
        return dense if agrees else dense + 1

    monkeypatch.setattr(dequantisation, "dequantise", run)
    tigon.patch(model)
    assert_same_step(model, stock)
    assert nodes == FUSED
    # Each weight is dequantised once to compare it, and then once in forward and once in backward.
    assert len(results) == (3 if agrees else 1) * len(NAMES)


def test_a_quantised_weight_that_backward_needs_must_not_change(nodes):
    model = build(convert=to_bf16_4bit)
    tigon.patch(model)
    y = model(TOKENS.to(DEVICE)).float().square().sum()
    layer = model.base_model.model.layer.o_proj.base_layer
    # Backward uses the weight of the forward pass if another one replaces it.
    old_weight, layer.weight = layer.weight, copy.deepcopy(layer.weight)
    y.backward(retain_graph=True)
    old_weight.data.zero_()
    with torch.no_grad():
        old_weight.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.backward()


@pytest.mark.parametrize(("autocast", "is_prepared"), [(False, False), (True, True), (False, True)])
def test_layers_of_4_bits_are_as_accurate_as_stock(autocast, is_prepared, nodes):
    """`prepare_model_for_kbit_training` casts all other weights to fp32, and so the inputs of the layers."""
    stock = build(convert=to_bf16_4bit)
    if is_prepared:
        stock.base_model.model.embed.float()
        stock.base_model.model.head.float()
    model = copy.deepcopy(stock)
    tigon.patch(model)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=autocast):
        assert_same_step(model, stock)
        # Without autocast, adapters of an fp32 input are computed in fp32.
        assert nodes == ([] if is_prepared and not autocast else FUSED)


@pytest.mark.parametrize(
    ("order", "memory"), [("adapters first", "lean+mlp"), ("adapters first", "lean"), ("patch first", "default")]
)
@pytest.mark.sampled(in_interpreter=2)
def test_a_language_model_runs_its_adapters_by_ops_in_either_order(nodes, order, memory):
    stock, model = with_lora(make_llama()), make_llama()
    report = tigon.patch(model, memory=memory) if order == "patch first" else None
    model = with_lora(model)
    report = report or tigon.patch(model, memory=memory)
    losses = {}
    for name, each in {"stock": stock, "patched": model}.items():
        nodes.clear()
        loss = each(input_ids=TOKENS.to(DEVICE), labels=TOKENS.to(DEVICE)).loss
        loss.backward()
        losses[name] = loss.detach()
        assert nodes == ([] if name == "stock" else FUSED)
    torch.testing.assert_close(losses["patched"], losses["stock"], rtol=1e-2, atol=0.0)
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm(), name
    assert sum(entry.count for entry in report.replaced if entry.part == "adapters") == len(NAMES)
    if order == "patch first":
        assert "replaced: low-rank adapters, added after the patch" in report.why("model.layers.0.self_attn.o_proj")
    report.restore()
    assert not any(find_replacement(module) for module in model.modules())
