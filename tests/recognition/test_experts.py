"""Experts are recognised by what they compute, and have the outputs and the gradients of the stock module."""

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn

from recognition.expert_steps import assert_same, step
from recognition.test_mixtures import _mixture
from tigon.ops.experts.arguments import ACTIVATIONS
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.ops.mlps.glu import ClampedGate
from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts import experts
from tigon.recognition.parts.experts import ExpertsRecipe, recognise_experts
from tigon.recognition.parts.mixtures import MixtureRecipe, recognise_mixture
from tigon.runtime.requirements import _release
from tigon.testing import assert_accurate

transformers = pytest.importorskip("transformers", "5.0")

T, K, E, H, INNER = 23, 3, 6, 32, 24
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), INNER),
    "hidden_size": H,
}
GPT_OSS_GATE = ClampedGate(7.0, 1.702, 1.0, is_interleaved=True)
# The package of the model, its config class, its class of experts, the activation of the op, options of the config.
FLAVOURS = {
    "silu": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeExperts", "silu", {}),
    "gelu tanh": ("gemma4", "Gemma4TextConfig", "Gemma4TextExperts", "gelu_tanh", {"enable_moe_block": True}),
    "gelu": ("mixtral", "MixtralConfig", "MixtralExperts", "gelu", {"hidden_act": "gelu"}),
    "a function as activation": ("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeExperts", "silu", {}),
    "no gate": ("nemotron_h", "NemotronHConfig", "NemotronHExperts", "relu2", {}),
    "transposed, biases, interleaved, clamped": ("gpt_oss", "GptOssConfig", "GptOssExperts", GPT_OSS_GATE, {}),
    "clamped": ("deepseek_v4", "DeepseekV4Config", "DeepseekV4Experts", ClampedGate(2.0), {"swiglu_limit": 2.0}),
    "relu": ("mixtral", "MixtralConfig", "MixtralExperts", None, {"hidden_act": "relu"}),
}
every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)
# Llama 4 runs every expert on every token; test_mixtures.py has what is particular to it.
MIXTURE = "a mixture"
every_kind = pytest.mark.parametrize("flavour", [*FLAVOURS, MIXTURE])


def _experts(flavour: str = "silu", chosen: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> nn.Module:
    if flavour == MIXTURE:
        return _mixture(dtype=dtype)
    package, config, experts, _, options = FLAVOURS[flavour]
    models = f"transformers.models.{package}"
    config = getattr(importlib.import_module(f"{models}.configuration_{package}"), config)(**SIZES | options)
    config._experts_implementation = chosen
    module = getattr(importlib.import_module(f"{models}.modeling_{package}"), experts)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.to(dtype).train()


def _inputs(tokens: int = T, choices: int = K, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, choices of experts and their weights. The last expert gets no token."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, H, generator=generator).to(dtype).requires_grad_()
    weights, index = torch.rand(tokens, E - 1, generator=generator).topk(choices)
    return hidden, index, weights.to(dtype).requires_grad_()


def _inputs_of(module: nn.Module, **options) -> tuple[Tensor, ...]:
    """Return the inputs of a module; a mixture takes the hidden states alone."""
    return _inputs(**options)[: 1 if hasattr(module, "router") else 3]


def _recipe_of(module: nn.Module) -> object:
    return (recognise_mixture if hasattr(module, "router") else recognise_experts)(module)


def _patched(module: nn.Module) -> nn.Module:
    recipe = _recipe_of(module)
    assert isinstance(recipe, ExpertsRecipe | MixtureRecipe), recipe
    install_guarded(module, recipe)
    return module


@pytest.mark.parametrize("inputs", [{}, {"choices": 1}, {"tokens": 1}], ids=str)
@pytest.mark.parametrize("chosen", ["grouped_mm", "eager"])
@every_flavour
@pytest.mark.sampled(2)
def test_output_and_gradients_are_the_stock_ones(flavour, chosen, inputs, monkeypatch):
    stock = _experts(flavour, chosen)
    module, recipe = copy.deepcopy(stock), recognise_experts(stock)
    assert recipe.activation == FLAVOURS[flavour][3]
    install_guarded(module, recipe)
    expected = step(stock, _inputs(**inputs))
    calls = []
    monkeypatch.setattr(experts, "moe_mlp", lambda *args, **options: calls.append(1) or moe_mlp(*args, **options))
    assert_same(step(module, _inputs(**inputs)), expected)
    assert calls, "the stock forward was called"


@every_kind
def test_without_tokens_all_gradients_are_zero(flavour):
    """The gradients must exist, because a rank without tokens takes part in the reduction over all ranks."""
    module = _patched(_experts(flavour))
    results = step(module, _inputs_of(module, tokens=0))
    assert results["output 0"].shape == (0, H)
    assert all((gradient == 0).all() for gradient in results.values())


@pytest.mark.parametrize("chosen", ["grouped_mm", "eager"])
@every_kind
def test_bf16_is_as_near_to_fp32_as_the_stock_module(flavour, chosen):
    stock = _experts(flavour, chosen, torch.bfloat16)
    module, inputs = _patched(copy.deepcopy(stock)), _inputs_of(stock, dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    ours, eager, exact = step(module, inputs), step(stock, inputs), step(copy.deepcopy(stock).float(), wide)
    for name in exact:
        assert_accurate(ours[name], eager[name], exact[name], msg=name)


@every_flavour
def test_choices_of_experts_on_other_ranks_have_no_effect(flavour):
    """Expert parallelism gives these choices the index E and the weight 0."""
    if "biases" in flavour and _release(transformers.__version__) < (5, 17):
        pytest.skip("transformers 5.13 adds unwritten memory to the stock gradients of biases")
    stock, inputs = _experts(flavour), _inputs()
    # transformers 5.23 reads this attribute.
    stock._is_expert_parallel = True
    module = _patched(copy.deepcopy(stock))
    index, weights = inputs[1].clone(), inputs[2].detach().clone()
    index[::2, 1], index[4] = E, E
    inputs = inputs[0], index, weights.masked_fill(index == E, 0.0).requires_grad_()
    results, expected = step(module, inputs), step(stock, inputs)
    # The stock gradient of a weight on another rank is 0, or undefined, because the memory was never written.
    is_local = index < E
    for each in (results, expected):
        # Unwritten memory may hold NaN, and NaN times 0 is NaN.
        each["input 2"] = each["input 2"].masked_fill(~is_local, 0.0)
    assert_same(results, expected)


FROZEN = [("silu", names) for names in ("gate_up_proj", "down_proj", "input 0", "input 2", "gate_up_proj down_proj")]
FROZEN += [(MIXTURE, name) for name in ("input 0", "experts.gate_up_proj", "experts.down_proj", "router.weight")]


@pytest.mark.parametrize(("flavour", "frozen"), FROZEN)
def test_frozen_tensors_have_no_gradient_and_the_others_have_the_stock_one(flavour, frozen):
    stock = _experts(flavour)
    module, inputs = _patched(copy.deepcopy(stock)), _inputs_of(stock)
    for name in [frozen] if "input" in frozen else frozen.split():
        for each in (stock, module):
            (inputs[int(name[-1])] if "input" in name else each.get_parameter(name)).requires_grad_(False)
    assert_same(step(module, inputs), step(stock, inputs))


@pytest.mark.parametrize("chosen", ["grouped_mm", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_stock_output_and_gradients(chosen, dtype):
    """The hidden states have another dtype than the weights, as the output of a norm does."""
    if torch.__version__ < (2, 9) and chosen == "grouped_mm" and dtype == torch.bfloat16:
        pytest.skip("with torch 2.8 the stock module multiplies fp32 by bf16, which raises")
    stock = _experts("silu", chosen, dtype)
    module, inputs = _patched(copy.deepcopy(stock)), _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results, expected = step(module, inputs), step(stock, inputs)
    # "eager" computes in the dtype of autocast, so the stock forward runs.
    assert_same(results, expected, 0.0 if chosen == "eager" else 2**-6 if dtype == torch.bfloat16 else 1e-5)


def test_the_choice_of_the_config_is_respected():
    """While `generate` runs, it selects batched_mm. Users may also register an implementation."""
    moe = pytest.importorskip("transformers.integrations.moe")
    module, inputs, calls = _patched(_experts()), _inputs(), []
    moe.ALL_EXPERTS_FUNCTIONS.register("theirs", lambda self, *args: calls.append(self))
    module.config._experts_implementation = "theirs"
    module(*inputs)
    assert calls == [module]
    assert recognise_experts(_experts(chosen="theirs")) == "its config has chosen 'theirs' for its experts"
    module.config._experts_implementation = "grouped_mm"
    module(*inputs)
    assert len(calls) == 1


OTHERS = {
    "doubled": lambda y, index: 2 * y,
    "off by a thousandth": lambda y, index: 1.001 * y,
    "one expert off by a thousandth": lambda y, index: y * (1 + 0.001 * (index == 0).any(-1, keepdim=True)),
}


@pytest.mark.parametrize("chosen", ["grouped_mm", "eager"])
@pytest.mark.parametrize("other", OTHERS)
def test_experts_that_compute_something_else_keep_their_forward(other, chosen):
    module = _experts(chosen=chosen)
    stock = type(module)

    def forward(self, hidden, index, weights):
        return OTHERS[other](stock.forward(self, hidden, index, weights), index)

    module.__class__ = type("Other", (stock,), {"forward": forward})
    assert recognise_experts(module).startswith("computes something else than moe_mlp")


CHANGES = {
    "has other state than gate_up_proj": lambda module: setattr(module, "scale", nn.Parameter(torch.ones(1))),
    "or hooks on its activation": lambda module: module.act_fn.register_forward_hook(lambda *args: None),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_changed_experts_keep_their_forward(reason):
    module = _experts()
    CHANGES[reason](module)
    assert reason in recognise_experts(module)


def test_parametrised_weights_give_the_stock_output_and_gradients():
    """A parametrisation, as PEFT adds for experts, gives the module another class and its weights another type."""

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    stock = _experts()
    module, inputs = _patched(copy.deepcopy(stock)), _inputs()
    for each in (stock, module):
        nn.utils.parametrize.register_parametrization(each, "gate_up_proj", Halved())
    assert_same(step(module, inputs), step(stock, inputs))


@pytest.mark.xfail(torch.__version__ < (2, 11), reason="torch.compile before 2.11 cannot trace every call of experts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flavour", [MIXTURE, "silu", "no gate", "transposed, biases, interleaved, clamped"])
@pytest.mark.sampled(8)
def test_compiles_without_a_graph_break(flavour, dtype):
    torch._dynamo.reset()
    module = _patched(_experts(flavour, dtype=dtype))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (T, T + 4):
        inputs = _inputs_of(module, tokens=tokens, dtype=dtype)
        expected, results = step(module, inputs), step(compiled, inputs, module.named_parameters())
        assert_same(results, expected, 2**-6 if dtype == torch.bfloat16 else 1e-5)


def test_every_activation_of_the_op_has_a_flavour():
    assert {flavour[3] for flavour in FLAVOURS.values() if isinstance(flavour[3], str)} == set(ACTIVATIONS)


LATER = [("silu", "act_fn", nn.Tanh()), *((name, "limit", 0.01) for name in FLAVOURS if "clamped" in name)]


@pytest.mark.parametrize(("flavour", "name", "value"), LATER)
def test_another_activation_or_limit_after_the_patch_is_used(flavour, name, value):
    module, inputs = _patched(_experts(flavour)), _inputs()
    setattr(module, name, value)
    torch.testing.assert_close(module(*inputs), type(module).forward(module, *inputs))


@pytest.mark.parametrize(
    "change",
    [lambda y, gate: y * 1.001, lambda y, gate: y.detach() + 0 * gate, lambda y, gate: y.clamp(max=3.0)],
    ids=["nearly", "detached", "result clamped"],
)
def test_gates_that_resemble_a_clamped_gate_are_called_themselves(change, monkeypatch):
    module = _experts("clamped")
    stock = type(module)._apply_gate
    monkeypatch.setattr(type(module), "_apply_gate", lambda self, h: change(stock(self, h), h[..., : h.shape[-1] // 2]))
    recipe = recognise_experts(module)
    assert recipe is None or not isinstance(getattr(recipe, "activation", None), ClampedGate)
