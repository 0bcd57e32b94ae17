"""`tigon.patch(model, fp8=...)` on mixtures: which fp8_calls of the experts run in FP8, and when weights are quantised.

The experts here have fewer rows than those that FP8 pays for, so the limit is lowered for them. No linear layer is wide
enough, so the experts alone run in FP8.
"""

import copy
import types

import pytest
import torch
from torch import nn

import fp8_eager
import tigon
from hf.fp8_steps import error, experts_in_fp8, reasons
from tigon.hf.fp8 import FEWEST_ROWS
from tigon.recognition.parts import fp8_experts as recognised
from tigon.recognition.replacement import find_replacement

pytest.importorskip("transformers")

pytestmark = pytest.mark.no_interpreter(reason="the interpreter computes products of bf16 wrongly")

NAMES = {f"model.layers.{i}.mlp.experts" for i in range(2)}


@pytest.fixture(autouse=True)
def _any_number_of_rows(monkeypatch):
    monkeypatch.setattr(recognised, "FEWEST_ROWS", 1)


@pytest.fixture
def make(make_bf16):
    """Return make(model_type, **config): it builds a mixture in bf16."""
    return lambda model_type="qwen3_moe", *args, **config: make_bf16(model_type, *args, **config)


def _copies(model: nn.Module) -> list:
    recipes = [find_replacement(m).recipe for name, m in model.named_modules() if name.endswith(".experts")]
    return [recipe.fp8.copies.cache for recipe in recipes]


def _train(model: nn.Module, batch: dict, micro_batches: int, optimizer: torch.optim.Optimizer) -> float:
    for _ in range(micro_batches):
        loss = model(**batch).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _in_eager_fp8(model: nn.Module) -> nn.Module:
    """Let the experts of a stock model compute what eager code computes in FP8."""

    def forward(self, x, index, weights):
        return fp8_eager.experts(x, self.gate_up_proj, self.down_proj, index, weights)

    for name, module in model.named_modules():
        if name in NAMES:
            module.forward = types.MethodType(forward, module)
    return model


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_training_is_that_of_eager_code_in_fp8(make, batch, model_type):
    """The differences to eager code are those of bf16, and those to training without FP8 are larger."""
    models = make(model_type), _in_eager_fp8(make(model_type)), make(model_type)
    tigon.patch(models[0], fp8="rowwise")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    losses = [[_train(m, batch, 1, optimizer) for m, optimizer in zip(models, optimizers, strict=True)] for _ in "1234"]
    decrease = losses[0][0] - losses[-1][0]
    assert decrease > 0.2
    for ours, eager, _ in losses:
        assert abs(ours - eager) < 0.02 * decrease + 0.005
    name = "model.layers.1.mlp.experts.down_proj"
    weights = [model.get_parameter(name) for model in models]
    start = make(model_type).get_parameter(name)
    updates = [weight.float() - start.float() for weight in weights]
    assert error(updates[0], updates[1]) < error(updates[0], updates[2])


def test_the_report_names_the_experts_and_the_reasons(make, monkeypatch):
    model = make()
    report = tigon.patch(model, fp8="tensorwise")
    (line,) = [entry for entry in report.replaced if entry.part == "fp8"]
    assert line.detail == (
        f"rowwise FP8 products in forward and dX, but not dW, from {FEWEST_ROWS} rows for each expert on"
    )
    assert line.module == "Qwen3MoeExperts"
    name = "model.layers.0.mlp.experts"
    assert "replaced: moe_mlp, silu" in report.why(name)
    assert "replaced: rowwise FP8 products" in report.why(name)
    assert "once their weights are in bf16 or fp16 (now float32)" in str(
        tigon.patch(make(dtype=torch.float32), fp8="rowwise")
    )
    odd = reasons(tigon.patch(make(moe_intermediate_size=40), fp8="rowwise"))
    assert odd[name] == "experts: their sizes are not multiples of 16 ((4, 80, 64) and (4, 64, 40))"
    assert reasons(tigon.patch(make(), fp8="rowwise", experts=False))[name] == "experts that moe_mlp does not compute"
    monkeypatch.setattr(recognised, "_has_products", lambda weight: False)
    other_gpu = reasons(tigon.patch(make(), fp8="rowwise"))
    assert other_gpu[name] == "experts: torch has grouped products in FP8 only for GPUs of compute capability 9.0"


def test_a_call_with_few_rows_is_that_of_bf16(make, step, batch, fp8_calls, monkeypatch):
    model, stock = make(), make()
    tigon.patch(stock)
    tigon.patch(model, fp8="rowwise")
    rows = 2 * batch["input_ids"].numel() // 4
    monkeypatch.setattr(recognised, "FEWEST_ROWS", rows + 1)
    actual, expected = step(model, batch), step(stock, batch)
    assert not fp8_calls
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    monkeypatch.setattr(recognised, "FEWEST_ROWS", rows)
    step(model, batch)
    assert len(fp8_calls) == 2


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpoint"])
def test_half_of_the_rows_are_enough_in_a_step_of_several_backwards(
    make, batch, fp8_calls, monkeypatch, is_checkpointed
):
    model = make()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tigon.patch(model, fp8="rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Two of four experts compute each token, so these are the rows of an expert in two micro-batches.
    rows = batch["input_ids"].numel()
    # The first step of several backwards is known to be one at its second forward, and the step after one is not known
    # to have one backward before it ends. Both layers run in each micro-batch.
    cases = [(1, rows, 0), (2, rows, 2), (2, rows, 4), (1, rows, 2), (1, rows, 0), (2, rows + 1, 0), (2, rows + 1, 0)]
    for micro_batches, limit, expected in cases:
        monkeypatch.setattr(recognised, "FEWEST_ROWS", limit)
        del fp8_calls[:]
        _train(model, batch, micro_batches, optimizer)
        assert len(fp8_calls) == (0 if is_checkpointed else expected)


def test_a_short_call_uses_the_copies_of_frozen_weights(make, batch, fp8_calls, monkeypatch):
    model = make().requires_grad_(False)
    model.enable_input_require_grads()
    tigon.patch(model, fp8="rowwise")
    model(**batch).loss.backward()
    del fp8_calls[:]
    monkeypatch.setattr(recognised, "FEWEST_ROWS", 10**6)
    model(**batch).loss.backward()
    assert len(fp8_calls) == 2
    with torch.no_grad():
        model(batch["input_ids"][:1])
        assert len(fp8_calls) == 4
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
        model(batch["input_ids"][:1])
    # The experts whose weight has changed run in bf16.
    assert len(fp8_calls) == 5


def test_frozen_weights_are_quantised_once_and_clear_fp8_frees_the_copies(make, batch, quantisations):
    model = make().requires_grad_(False)
    report = tigon.patch(model, fp8="rowwise")
    for _ in range(3):
        first = model(**batch).loss
    assert quantisations == 4 * [(True, False)]
    for parameter in model.model.layers.parameters():
        parameter.data.mul_(0.5)
    assert all(cache.nbytes > 0 for cache in _copies(model))
    report.clear_fp8()
    assert _copies(model) == [None, None]
    assert not torch.equal(model(**batch).loss, first)
    assert len(quantisations) == 8


@pytest.mark.parametrize("patched_first", [False, True], ids=["adapters first", "patch first"])
def test_experts_with_adapters_stay_in_bf16(make, step, batch, fp8_calls, patched_first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, config).train()

    model, twin = make(), adapted(make())
    if patched_first:
        # The copies of the frozen weights serve until the weights change.
        tigon.patch(model.requires_grad_(False), fp8="rowwise")
        model(**batch)
        assert fp8_calls.pop() == fp8_calls.pop() == ("moe_mlp_in_fp8", 2 * batch["input_ids"].numel())
        model = adapted(model)
    else:
        model = adapted(model)
        report = tigon.patch(model, fp8="rowwise")
        assert "experts with adapters" in set(reasons(report).values())
    tigon.patch(twin)
    assert torch.equal(step(model, batch)["loss"], step(twin, batch)["loss"])
    assert not fp8_calls
    if patched_first:
        # A merge writes through `data`, so no copies of the weights before it may serve.
        model = model.merge_and_unload()
        merged = model(**batch).loss
        assert len(fp8_calls) == 2
        assert torch.equal(merged, copy.deepcopy(model)(**batch).loss)


def test_experts_whose_inputs_are_weighted_stay_in_bf16(make_model):
    config = {"num_local_experts": 4, "intermediate_size_mlp": 96, "moe_layers": [0, 1], "head_dim": 16}
    report = tigon.patch(make_model("llama4_text", torch.bfloat16, **config), fp8="rowwise")
    assert not experts_in_fp8(report)
    name = "model.layers.0.feed_forward"
    assert reasons(report)[name] == "experts whose inputs are multiplied by the weights of the router"
