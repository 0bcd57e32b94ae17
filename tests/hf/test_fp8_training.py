"""`tigon.patch(model, fp8=...)`: linear layers and experts train near bf16, in any dtype, copy and level of memory.

The models here are smaller than those that FP8 pays for, so the limits are lowered: the one for the width of a layer,
or the one for the rows of experts. No linear layer of the mixtures is wide enough, so their experts alone run in FP8.
"""

import pytest
import torch
from torch import nn

import tigon
from hf import same_step
from hf.changes import COPIES
from hf.fp8_steps import BF16_ERROR, assert_near, error, experts_in_fp8, layers_in_fp8
from op_cases import one_in
from tigon.hf import fp8
from tigon.memory.levels import MEMORY
from tigon.ops.fp8.formats import RECIPES
from tigon.recognition.parts import fp8_experts
from tigon.recognition.replacement import find_replacement

pytest.importorskip("transformers")

pytestmark = pytest.mark.no_interpreter(reason="the interpreter computes products of bf16 wrongly")

EXPERTS = {f"model.layers.{i}.mlp.experts" for i in range(2)}
# A model type, a weight in it that is trained in FP8, and the number of modules that run in FP8.
KINDS = {
    "layers": ("qwen3", "model.layers.0.mlp.up_proj.weight", 14),
    "experts": ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", 2),
}


def lower_limit(monkeypatch, model_type: str) -> None:
    if model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
        monkeypatch.setattr(fp8_experts, "FEWEST_ROWS", 1)
    else:
        monkeypatch.setattr(fp8, "NARROWEST", 1)


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> tuple[str, str, int]:
    lower_limit(monkeypatch, KINDS[request.param][0])
    return KINDS[request.param]


def count_in_fp8(report) -> int:
    return len(layers_in_fp8(report)) + len(experts_in_fp8(report))


@one_in(
    4,
    model_type=["llama", "qwen3", "phi3", "qwen2_moe", "stablelm", "qwen3_moe", "mixtral", "gpt_oss"],
    recipe=[*RECIPES],
    fp8_dw={"dW in FP8": True, "dW in bf16": False},
)
def test_loss_and_gradients_are_near_those_of_bf16(make_bf16, step, batch, monkeypatch, model_type, recipe, fp8_dw):
    """StableLM has biases and an MLP without a gate. After the step, `restore` gives the stock model back."""
    lower_limit(monkeypatch, model_type)
    options = {"use_qkv_bias": True} if model_type == "stablelm" else {}
    model, stock = make_bf16(model_type, **options), make_bf16(model_type, **options)
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = tigon.patch(model, fp8=recipe, fp8_dw=fp8_dw)
    names = [f"{name}.weight" for name in layers_in_fp8(report)]
    names += [f"{name}.gate_up_proj" for name in experts_in_fp8(report)]
    assert len(names) >= 2
    actual, expected = step(model, batch), step(stock, batch)
    assert_near(actual, expected)
    assert all(error(actual[name], expected[name]) > BF16_ERROR for name in names)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    report.restore()
    assert {name: list(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(step(model, batch)["loss"], expected["loss"])


def test_a_model_in_fp32_runs_in_fp8_once_it_is_in_bf16(make_bf16, step, batch, kind, fp8_calls):
    model_type, _, _ = kind
    model, stock = make_bf16(model_type, torch.float32), make_bf16(model_type, torch.float32)
    report = str(tigon.patch(model, fp8="rowwise"))
    assert "in bf16 or fp16 (now float32)" in report
    same_step.assert_same(step(model, batch), step(stock, batch))
    assert not fp8_calls
    if model_type == "qwen3":
        assert ", under autocast or once its weight is" in report
        with torch.autocast("cpu", torch.bfloat16):
            assert_near(step(model, batch), step(stock, batch))
        assert len(fp8_calls) == 6
    fp8_calls.clear()
    step(model.to(torch.bfloat16), batch)
    assert len(fp8_calls) == (6 if model_type == "qwen3" else 2)


def test_evaluation_runs_in_fp8(make_bf16, kind, fp8_calls):
    model = make_bf16(kind[0])
    tigon.patch(model, fp8="rowwise")
    tokens = torch.randint(3, 131, (32, 16))
    trained = model(input_ids=tokens, labels=tokens).loss
    count = len(fp8_calls)
    with torch.no_grad():
        assert error(model.eval()(input_ids=tokens, labels=tokens).loss, trained) < BF16_ERROR
    assert len(fp8_calls) == 2 * count > 0


def test_later_patches_change_the_recipe_and_restore_returns_to_the_earlier_one(make_bf16, batch, kind):
    model_type, name, count = kind
    model = make_bf16(model_type)
    tigon.patch(model)
    stock = model(**batch).loss
    first = tigon.patch(model, fp8="rowwise")
    assert count_in_fp8(first) == count
    rowwise = model(**batch).loss
    assert not torch.equal(rowwise, stock)
    again = tigon.patch(model, fp8="rowwise")
    assert not count_in_fp8(again)
    assert "has no effect" not in str(again)
    second = tigon.patch(model, fp8="tensorwise")
    assert count_in_fp8(second) == count
    # Experts always have rowwise scales.
    assert torch.equal(model(**batch).loss, rowwise) == (model_type == "qwen3_moe")
    second.restore()
    assert torch.equal(model(**batch).loss, rowwise)
    first.restore()
    assert torch.equal(model(**batch).loss, stock)
    assert (find_replacement(model.get_submodule(name.rpartition(".")[0])) is None) == (model_type == "qwen3")


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.sampled(3)
def test_a_copy_runs_in_fp8_with_its_own_weights(make_bf16, batch, kind, fp8_calls, duplicate):
    model_type, name, _ = kind
    model = make_bf16(model_type).requires_grad_(False)
    tigon.patch(model, fp8="rowwise")
    first = model(**batch).loss
    twin = duplicate(model)
    count = len(fp8_calls)
    with torch.no_grad():
        twin.get_parameter(name).mul_(2)
    assert not torch.equal(twin(**batch).loss, first)
    assert torch.equal(model(**batch).loss, first)
    assert len(fp8_calls) == 3 * count > 0


WRITES = {
    "detach": lambda p: p.detach().add_(p.grad, alpha=-0.1),
    "data": lambda p: p.data.add_(p.grad, alpha=-0.1),
    "other memory": lambda p: setattr(p, "data", p.data - 0.1 * p.grad),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.sampled(2)
def test_weights_that_an_optimizer_changes_are_quantised_again(make_bf16, batch, kind, write):
    """After steps of two backwards and a write, a model has the loss of a fresh one with its weights.

    A write through `data` does not change the version of a parameter.
    """
    model, twin = make_bf16(kind[0]), make_bf16(kind[0])
    for each in (model, twin):
        tigon.patch(each, fp8="rowwise")
    for _ in range(2):
        for _ in range(2):
            model(**batch).loss.backward()
        for parameter in model.parameters():
            write(parameter)
            parameter.grad = None
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(**batch).loss, twin(**batch).loss)


@one_in(4, level=MEMORY[1:], model_type=["qwen3", "qwen3_moe", "gpt_oss"])
def test_each_level_of_memory_gives_the_same_step(make_bf16, step, batch, monkeypatch, fp8_calls, level, model_type):
    lower_limit(monkeypatch, model_type)
    model, other = make_bf16(model_type), make_bf16(model_type)
    tigon.patch(model, fp8="rowwise")
    tigon.patch(other, fp8="rowwise", memory=level)
    expected, actual = step(model, batch), step(other, batch)
    assert len(fp8_calls) >= 4
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.thorough
def test_a_compiled_model_runs_in_fp8(make_bf16, step, batch, kind):
    """Linear layers in FP8 cause no graph break."""
    torch._dynamo.reset()
    model_type, name, _ = kind
    model, stock = (make_bf16(model_type, num_hidden_layers=1) for _ in range(2))
    tigon.patch(model, fp8="rowwise")
    compiled: nn.Module = torch.compile(model, fullgraph=model_type == "qwen3", backend="aot_eager")
    actual = {key.removeprefix("_orig_mod."): value for key, value in step(compiled, batch).items()}
    expected = step(stock, batch)
    assert_near(actual, expected)
    assert error(actual[name], expected[name]) > BF16_ERROR
    torch._dynamo.reset()
