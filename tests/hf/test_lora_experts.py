"""Models with adapters of PEFT on the weights of their experts (`target_parameters`).

They compute what they compute without Tigon, whatever happens to the adapters later, and no tensor has the size of the
experts' weights.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import tigon
import tigon.recognition.parts.experts as experts_module
from hf.tiny import tiny_model
from op_cases import DEVICE
from tigon.recognition.parts.expert_adapters import ExpertAdapterRecipe, recognise_expert_adapters
from tigon.recognition.replacement import find_replacement

peft = pytest.importorskip("peft")

# The class of the model and the parameters with adapters. gpt-oss stores the weights transposed, has biases, and an
# activation that no op has.
TYPES = ["qwen3_moe", "mixtral", "gpt_oss"]
NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# The interpreter is slow.
TOKENS = 96 if DEVICE == "cuda" else 24


def build(model_type: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Return a tiny model with random adapters on the queries and on the experts."""
    return adapt(tiny_model(model_type, dtype), **options).to(DEVICE)


def adapt(model: nn.Module, **options: Any) -> nn.Module:
    """Add adapters with random values of fixed seeds."""
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": NAMES} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**config, task_type="CAUSAL_LM"))
    randomise(model)
    return model.train()


def randomise(model: nn.Module) -> None:
    """Set all factors to random values. PEFT's B is zero at first, so the gradient of A would be zero."""
    for i, (_, parameter) in enumerate((n, p) for n, p in model.named_parameters() if "lora_" in n):
        generator = torch.Generator().manual_seed(i)
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter)


def step(model: nn.Module) -> dict[str, Tensor]:
    """Return the loss and the gradients of all parameters that train, by name."""
    model.zero_grad(set_to_none=True)
    ids = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def assert_same_step(model: nn.Module, stock: nn.Module) -> None:
    """Compare a step of both models in fp32."""
    assert_same(step(model), step(stock))


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare two steps, of which only the order of sums differs."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        error = (ours[name] - value).abs().max()
        assert error <= 2e-4 * value.abs().max() + 1e-9, (name, error)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """Record each call of the op, as the numbers of adapters of its two products."""
    calls: list[tuple[int, int]] = []
    run = experts_module.adapted_moe_mlp

    def count(*args: Any) -> Tensor:
        # The small copies of recognition have another number of experts.
        if len(args[1].up) != experts_module.EXPERTS:
            calls.append((len(args[4]), len(args[5])))
        return run(*args)

    monkeypatch.setattr(experts_module, "adapted_moe_mlp", count)
    return calls


def experts_of(model: nn.Module) -> Any:
    return next(m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "down_proj"))


def wrapper_of(model: nn.Module) -> Any:
    return next(m for m in model.modules() if type(m).__name__ == "ParamWrapper")


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.sampled(in_interpreter=3)
def test_a_step_is_that_of_the_stock_model(model_type, calls, monkeypatch):
    stock = build(model_type)
    model = copy.deepcopy(stock)
    report = tigon.patch(model)
    rows = [entry for entry in report.replaced if entry.module == "ParamWrapper"]
    assert [(row.part, row.detail) for row in rows] == [("adapters", "low-rank adapters of experts")]
    expected = step(stock)
    with monkeypatch.context() as context:
        context.setattr(parametrize, "register_parametrization", lambda *a, **k: pytest.fail("adds B A to the weights"))
        assert_same(step(model), expected)
    assert set(calls) == {(1, 1)}
    assert len(calls) == rows[0].count // 2
    assert experts_of(model).down_proj.grad is None
    assert any("gate_up" not in name and "experts.base_layer.lora_A" in name for name in expected)
    report.restore()
    calls.clear()
    assert_same_step(model, stock)
    assert not calls


@pytest.mark.kernels
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.sampled(in_interpreter=6)
def test_the_experts_are_as_accurate_as_with_peft(model_type, dtype, calls):
    """The adapters are in fp32. Each error is compared with that of PEFT, both against the same experts in fp64."""
    model = build(model_type, dtype)
    wrappers = []
    for wide in (True, False):
        twin = copy.deepcopy(wrapper_of(model))
        wrappers.append(twin.double() if wide else twin)
    tigon.patch(model)
    exact, stock, ours = *wrappers, wrapper_of(model)
    # `grouped_mm` has no products in fp64.
    experts_of(exact).config._experts_implementation = "eager"
    assert isinstance(find_replacement(ours).recipe, ExpertAdapterRecipe)
    e, h = experts_of(model).num_experts, model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(TOKENS, h, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weights, index = torch.rand(TOKENS, e, generator=generator).to(DEVICE, dtype).topk(2)
    results = []
    for wrapper, kind in ((exact, torch.float64), (stock, dtype), (ours, dtype)):
        leaf = x.to(kind).requires_grad_()
        y = wrapper(leaf, index, weights.to(kind))
        parameters = [p for p in wrapper.parameters() if p.requires_grad]
        results.append([y, *torch.autograd.grad(y, [leaf, *parameters], upstream.to(kind))])
    assert calls
    for i, (expected, theirs, mine) in enumerate(zip(*results, strict=True)):
        assert mine.dtype == theirs.dtype
        errors = [(value.double() - expected).norm() for value in (theirs, mine)]
        assert errors[1] <= 1.1 * errors[0], (i, errors)


@pytest.mark.thorough_in_interpreter
def test_the_patch_may_come_first(calls):
    model = tiny_model("qwen3_moe").to(DEVICE)
    stock = adapt(copy.deepcopy(model))
    report = tigon.patch(model)
    model = adapt(model)
    assert_same_step(model, stock)
    assert set(calls) == {(1, 1)}
    assert "low-rank adapters of experts, added after the patch" in str(report)
    report.restore()
    calls.clear()
    assert_same_step(model, stock)
    assert not calls


def _add(model: nn.Module, name: str = "second", **options: Any) -> None:
    config = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "target_parameters": NAMES} | options
    model.add_adapter(name, peft.LoraConfig(**config, task_type="CAUSAL_LM"))
    randomise(model)


def _scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


# The change, and the numbers of adapters in the calls of the op; None if it is not called.
CHANGES: dict[str, tuple[Callable, set | None]] = {
    "switched": (lambda model: (_add(model), model.set_adapter("second")), {(1, 1)}),
    "two active adapters": (
        lambda model: (_add(model), model.base_model.set_adapter(["default", "second"])),
        {(2, 2)},
    ),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), {(0, 0)}),
    "one disabled": (lambda model: wrapper_of(model).enable_adapters(False), {(1, 0), (1, 1)}),
    "merged": (lambda model: model.merge_adapter(), {(0, 0)}),
    "unmerged": (lambda model: (model.merge_adapter(), model.unmerge_adapter()), {(1, 1)}),
    "scaled": (_scale, {(1, 1)}),
    "unloaded": (lambda model: model.unload(), None),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled(3)
@pytest.mark.thorough_in_interpreter
def test_the_next_call_follows_a_change(change, expected, calls):
    stock = build()
    model = copy.deepcopy(stock)
    tigon.patch(model)
    step(model)
    calls.clear()
    for each in (model, stock):
        change(each)
    assert_same_step(model, stock)
    assert (set(calls) or None) == expected


def test_dropout_is_refused_by_peft():
    with pytest.raises(ValueError, match="lora_dropout"):
        build(lora_dropout=0.1)


@pytest.mark.thorough_in_interpreter
def test_another_layout_of_the_factors_is_left_alone(monkeypatch):
    """A version of PEFT that computes something else from A and B keeps its forward, and the report says why."""
    from peft.tuners.lora.layer import ParamWrapper

    stock = ParamWrapper.get_delta_factors
    monkeypatch.setattr(
        ParamWrapper, "get_delta_factors", lambda *args: tuple(f.flip(0) for f in stock(*args)[:2]) + stock(*args)[2:]
    )
    model = build()
    report = tigon.patch(model)
    assert not [entry for entry in report.replaced if entry.module == "ParamWrapper"]
    assert "computes something else than experts with low-rank adapters" in str(report)


@pytest.mark.thorough_in_interpreter
def test_a_method_that_changes_after_the_patch_runs(monkeypatch, calls):
    from peft.tuners.lora.layer import ParamWrapper

    model = build()
    tigon.patch(model)
    stock, runs = ParamWrapper.get_delta_factors, []
    monkeypatch.setattr(ParamWrapper, "get_delta_factors", lambda *args: runs.append(1) or stock(*args))
    step(model)
    assert runs
    assert not calls


@pytest.mark.thorough_in_interpreter
def test_a_hook_that_lets_the_stock_experts_run_loses_no_adapter(calls):
    """The wrapper has read the adapters by then, and the recipe of the experts does not run."""
    stock = build()
    model = copy.deepcopy(stock)
    tigon.patch(model)
    for each in (model, stock):
        change = lambda module, args: setattr(module.config, "_experts_implementation", "batched_mm")
        experts_of(each).register_forward_pre_hook(change)
    assert_same_step(model, stock)
    assert not calls


@pytest.mark.thorough_in_interpreter
def test_other_parameters_are_left_alone():
    """PEFT treats the biases of all experts as one matrix."""
    model = build("gpt_oss", target_parameters=["mlp.experts.gate_up_proj_bias"])
    report = tigon.patch(model)
    assert "moe_mlp takes adapters of gate_up_proj and down_proj only" in str(report)
    assert recognise_expert_adapters(nn.Linear(2, 2)) is None
