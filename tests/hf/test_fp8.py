"""`tigon.patch(model, fp8=...)`: which layers run in FP8, how close the gradients are, and what undoes it.

Most models here are smaller than the limit for the width of a layer, so the limit is lowered for them.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import tigon
from hf import same_step
from hf.fp8_steps import (
    BF16_ERROR,
    GRADIENT_ERROR,
    LOSS_ERROR,
    assert_near,
    assert_written_weights_are_quantised_again,
    error,
    layers_in_fp8,
    reasons,
    with_lora,
)
from tigon.hf import fp8
from tigon.memory.levels import MEMORY
from tigon.ops.fp8.formats import RECIPES
from tigon.recognition.parts import fp8 as recognised
from tigon.recognition.replacement import find_replacement

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.no_interpreter(reason="the interpreter computes products of bf16 wrongly")

MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _any_width(monkeypatch):
    monkeypatch.setattr(fp8, "NARROWEST", 1)


@pytest.fixture
def make(make_model):
    """Return make(model_type, **config): it builds a model in bf16, whose head does not make the loss large."""

    def build(model_type: str = "qwen3", **config) -> nn.Module:
        model = make_model(model_type, torch.bfloat16, **config)
        with torch.no_grad():
            model.get_output_embeddings().weight /= 5
        return model

    return build


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which each call of an op in FP8 adds its name and the number of its weights."""
    names = []

    def watch(name: str, count) -> None:
        function = getattr(recognised, name)

        def call(*args, **kwargs):
            names.append((name, count(args)))
            return function(*args, **kwargs)

        monkeypatch.setattr(recognised, name, call)

    watch("fp8_projections", lambda args: len(args[1]))
    watch("fp8_glu_mlp", lambda args: len(args) - 1)
    return names


@pytest.fixture
def quantisations(monkeypatch):
    """Return a list to which each quantisation of a group of weights adds the copies that it made."""
    from tigon.ops.fp8 import weights as module

    made, function = [], module.quantise_weights

    def quantise_weights(weights, is_rowwise, needs_rows, needs_transposed):
        made.append((needs_rows, needs_transposed))
        return function(weights, is_rowwise, needs_rows, needs_transposed)

    monkeypatch.setattr(module, "quantise_weights", quantise_weights)
    return made


# --- training steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8_dw", [True, False], ids=["dW in FP8", "dW in bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "qwen2_moe"])
@pytest.mark.sampled(3)
def test_loss_and_gradients_are_near_those_of_bf16(make, step, batch, model_type, recipe, fp8_dw):
    config = MIXTURE if model_type == "qwen2_moe" else {}
    model, stock = make(model_type, **config), make(model_type, **config)
    report = tigon.patch(model, fp8=recipe, fp8_dw=fp8_dw)
    assert layers_in_fp8(report)
    actual, expected = step(model, batch), step(stock, batch)
    assert_near(actual, expected)
    for name in layers_in_fp8(report):
        assert error(actual[f"{name}.weight"], expected[f"{name}.weight"]) > BF16_ERROR, name


def test_layers_with_one_input_and_gated_mlps_are_single_ops(make, step, batch, calls):
    model = make("qwen3")
    tigon.patch(model, fp8="rowwise")
    step(model, batch)
    layer = [("fp8_projections", 3), ("fp8_projections", 1), ("fp8_glu_mlp", 3)]
    assert calls == 2 * layer


@pytest.mark.parametrize("part", ["fused_statements", "glu"])
def test_other_parts_may_be_left_out(make, step, batch, calls, part):
    model, stock = make("qwen3"), make("qwen3")
    tigon.patch(model, fp8="rowwise", **{part: False})
    assert_near(step(model, batch), step(stock, batch))
    assert ("fp8_projections", 1) in calls
    assert (("fp8_glu_mlp", 3) in calls) == (part != "glu")


def test_biases_and_an_activation_without_a_gate(step, batch):
    """An MLP of two layers calls both of them, and each runs in FP8."""
    config = transformers.StableLmConfig(
        vocab_size=131, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_qkv_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    stock = copy.deepcopy(model)
    report = tigon.patch(model, fp8="rowwise")
    assert len(layers_in_fp8(report)) == 14
    assert_near(step(model, batch), step(stock, batch))


# --- the choice of layers ------------------------------------------------------------------------


def test_the_report_has_a_line_for_each_reason(make, monkeypatch):
    monkeypatch.setattr(fp8, "NARROWEST", 32)
    model = make("qwen2_moe", **MIXTURE | {"shared_expert_intermediate_size": 200})
    report = tigon.patch(model, fp8="tensorwise")
    assert layers_in_fp8(report) == {
        f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "o_proj")
    }
    lines = set(reasons(report).values())
    assert lines == {
        "too narrow for FP8 to pay (64 -> 32)",
        "its sizes are not multiples of 16 (64 -> 200)",
        "its sizes are not multiples of 16 (200 -> 64)",
        "its sizes are not multiples of 16 (64 -> 1)",
        "not in a repeated decoder layer",
    }
    assert "left alone: not in a repeated decoder layer" in report.why("lm_head")
    assert "replaced: tensorwise FP8 products in forward, dX and dW" in report.why("model.layers.1.self_attn.q_proj")


def test_the_width_that_pays_is_that_of_real_models(monkeypatch):
    monkeypatch.undo()
    widths = {(4096, 4096), (4096, 1024), (14336, 4096), (2048, 512), (3584, 512), (704, 704)}
    assert all(a * b >= fp8.NARROWEST * (a + b) for a, b in widths)
    assert all(a * b < fp8.NARROWEST * (a + b) for a, b in {(1024, 512), (4096, 16), (512, 512), (7168, 256)})


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    """A decoder layer of plain torch, with a router, a list of experts, and an expert that every token has."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.router = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(32))
        self.shared = nn.ModuleDict({"up": nn.Linear(64, 32), "down": nn.Linear(32, 64)})

    def forward(self, x):
        x = x + self.mixer(x) + self.shared["down"](torch.relu(self.shared["up"](x)))
        weight, index = self.router(x).softmax(-1).max(-1)
        return x + torch.where(index[..., None] == 0, self.experts[0](x), self.experts[1](x)) * weight[..., None]


@pytest.fixture
def plain_model():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embed": nn.Linear(64, 64), "blocks": nn.Sequential(Block(), Block()), "head": nn.Linear(64, 256)}
    ).to(torch.bfloat16)


def test_a_model_of_plain_torch_is_read_by_its_structure(plain_model):
    report = tigon.patch(plain_model, fp8="rowwise")
    names = "mixer", "shared.up", "shared.down"
    assert layers_in_fp8(report) == {f"blocks.{i}.{name}" for i in range(2) for name in names}
    assert reasons(report) == {
        "embed": "not in a repeated decoder layer",
        "blocks.0.router": "a router: its output selects experts",
        "blocks.0.experts.0.up": "an expert: the router decides how many rows it has",
    }
    x = torch.randn(3, 24, 64, dtype=torch.bfloat16)
    actual = plain_model["blocks"](x)
    report.restore()
    expected = plain_model["blocks"](x)
    assert BF16_ERROR < error(actual, expected) < GRADIENT_ERROR


def test_layers_that_are_no_plain_linear_stay(batch, step):
    """GPT-2 has layers that multiply by transposed weights."""
    config = transformers.GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
    report = tigon.patch(model, fp8="rowwise")
    assert not layers_in_fp8(report)
    assert "note: fp8='rowwise' has no effect, because no linear layer can run in FP8" in str(report)

    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    other = nn.Sequential(*(nn.ModuleDict({"a": Twice(64, 64), "b": nn.Linear(64, 64)}) for _ in range(2)))
    assert reasons(tigon.patch(other, fp8="rowwise")) == {"0.a": "no plain nn.Linear"}


def test_a_forward_of_other_code_stays(make):
    model = make()
    layer = model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    report = tigon.patch(model, fp8="rowwise")
    assert "its forward was already replaced" in reasons(report)["model.layers.0.self_attn.q_proj"]
    assert "model.layers.1.self_attn.q_proj" in layers_in_fp8(report)


@pytest.mark.parametrize(
    ("options", "error_type", "message"),
    [
        (
            {"fp8": "blockwise"},
            ValueError,
            r"patch: fp8 must be one of 'tensorwise', 'rowwise' or None, got 'blockwise'",
        ),
        ({"fp8": True}, ValueError, r"patch: fp8 must be one of 'tensorwise', 'rowwise' or None, got True"),
        ({"fp8": "rowwise", "fp8_dw": 1}, TypeError, r"patch: fp8_dw must be True or False, got 1"),
    ],
    ids=["recipe", "bool", "fp8_dw"],
)
def test_bad_options_are_refused(make, options, error_type, message):
    model = make()
    with pytest.raises(error_type, match=message):
        tigon.patch(model, **options)
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_gpu_without_fp8_units_is_refused(make, monkeypatch):
    """The weights pretend to be on a GPU."""
    model = make()
    monkeypatch.setattr(fp8, "has_fp8_units", lambda weight: False)
    monkeypatch.setattr(fp8, "_device_of", lambda layer: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    message = r"patch: fp8='rowwise' needs a GPU with FP8 units, got NVIDIA A100 of compute capability 8\.0"
    with pytest.raises(ValueError, match=message):
        tigon.patch(model, fp8="rowwise")
    assert not any("forward" in vars(m) for m in model.modules())


# --- dtypes and calls that stay ------------------------------------------------------------------


def test_a_model_in_fp32_runs_in_fp8_only_under_autocast_or_in_bf16(make_model, batch, step, calls):
    model, stock = make_model("qwen3"), make_model("qwen3")
    report = tigon.patch(model, fp8="rowwise")
    assert ", under autocast or once its weight is in bf16 or fp16 (now float32)" in str(report)
    same_step.assert_same(step(model, batch), step(stock, batch))
    assert not calls
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(step(model, batch), step(stock, batch))
    assert len(calls) == 6
    model.to(torch.bfloat16)
    step(model, batch)
    assert len(calls) == 12


def test_a_short_call_without_gradients_is_that_of_bf16(make, calls):
    model, stock = make(), make()
    tigon.patch(model, fp8="rowwise", loss=False)
    tokens = torch.randint(3, 131, (1, 11))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, stock(tokens).logits)
        assert not calls
        model(torch.randint(3, 131, (32, 16)))
    assert len(calls) == 6


def test_evaluation_runs_in_fp8(make, calls):
    model = make()
    tigon.patch(model, fp8="rowwise")
    tokens = torch.randint(3, 131, (32, 16))
    trained = model(input_ids=tokens, labels=tokens).loss
    with torch.no_grad():
        evaluated = model.eval()(input_ids=tokens, labels=tokens).loss
    assert len(calls) == 12
    assert error(evaluated, trained) < BF16_ERROR


def test_hooks_of_a_layer_run(make, step, batch, calls):
    model = make()
    tigon.patch(model, fp8="rowwise")
    shapes = []
    layer = model.model.layers[0]
    for module in (layer.self_attn.q_proj, layer.mlp.up_proj):
        module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    step(model, batch)
    assert shapes == [(3, 11, 128), (3, 11, 112)]
    # The layers of the first decoder layer run one by one, and all of them in FP8.
    assert calls[:7] == [("fp8_projections", 1)] * 7


def test_another_forward_of_all_linear_layers_is_used(make, batch, calls, monkeypatch):
    model = make()
    tigon.patch(model, fp8="rowwise")
    count = []
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: count.append(1) or stock(self, x))
    model(**batch)
    assert not calls
    assert len(count) >= 14


# --- restore and copies --------------------------------------------------------------------------


def test_restore_gives_the_stock_model_back(make, step, batch):
    model, stock = make(), make()
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = tigon.patch(model, fp8="tensorwise")
    step(model, batch)
    assert {name: value.dtype for name, value in model.state_dict().items()} == {n: v.dtype for n, v in state.items()}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    report.restore()
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before
    for name, value in step(stock, batch).items():
        assert torch.equal(step(model, batch)[name], value)
        break


def test_a_second_patch_changes_the_recipe_and_restore_returns_to_the_first(make, batch):
    model = make()
    tigon.patch(model)
    first = tigon.patch(model, fp8="rowwise")
    assert len(layers_in_fp8(first)) == 14
    rowwise = model(**batch).loss
    assert not layers_in_fp8(tigon.patch(model, fp8="rowwise"))
    second = tigon.patch(model, fp8="tensorwise")
    assert len(layers_in_fp8(second)) == 14
    assert not torch.equal(model(**batch).loss, rowwise)
    second.restore()
    assert torch.equal(model(**batch).loss, rowwise)
    first.restore()
    assert find_replacement(model.model.layers[0].mlp.up_proj) is None


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_runs_in_fp8_with_its_own_weights(make, step, batch, calls, copy_of):
    model = make()
    tigon.patch(model, fp8="rowwise")
    step(model, batch)
    twin = copy_of(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.mul_(2)
    del calls[:]
    twin.zero_grad()
    model.zero_grad()
    first, second = twin(**batch).loss, model(**batch).loss
    assert len(calls) == 12
    assert not torch.equal(first, second)


def test_models_of_a_type_are_patched_when_they_are_built(batch):
    config = transformers.Qwen3Config(
        vocab_size=131, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    report = tigon.patch("qwen3", fp8="rowwise")
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        assert len(layers_in_fp8(report)) == 14
    finally:
        report.restore()
    model.train()(**batch).loss.backward()


# --- the quantised weights -----------------------------------------------------------------------


def train(model: nn.Module, batch: dict, micro_batches: int, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(micro_batches):
        model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_micro_batches_share_the_quantised_weights(make, batch, quantisations):
    model = make()
    tigon.patch(model, fp8="rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = 2 * 4
    for micro_batches in (1, 3, 1):
        del quantisations[:]
        train(model, batch, micro_batches, optimizer)
        assert quantisations == groups * [(True, True)]


def test_a_level_of_memory_keeps_no_copies_unless_steps_accumulate(make, batch, quantisations):
    model = make()
    tigon.patch(model, fp8="rowwise", memory="lean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = 2 * 4
    train(model, batch, 1, optimizer)
    assert sorted(quantisations) == groups * [(False, True)] + groups * [(True, False)]
    for expected in (2 * groups + groups, groups):
        # The first step that accumulates is not known to do so before its second backward.
        del quantisations[:]
        train(model, batch, 3, optimizer)
        assert len(quantisations) == expected
    recipe = find_replacement(model.model.layers[0].self_attn.q_proj).recipe
    train(model, batch, 1, optimizer)
    train(model, batch, 1, optimizer)
    assert all(cache.cache is None for cache in recipe.caches.values())


def test_checkpointed_layers_keep_no_copies(make, batch, quantisations):
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tigon.patch(model, fp8="rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, batch, 1, optimizer)
    recipes = (getattr(find_replacement(module), "recipe", None) for module in model.modules())
    caches = [c for recipe in recipes if isinstance(recipe, recognised.FP8Recipe) for c in recipe.caches.values()]
    assert len(caches) == 2 * 3
    assert all(cache.cache is None for cache in caches)
    del quantisations[:]
    train(model, batch, 3, optimizer)
    train(model, batch, 3, optimizer)
    # The second step knows that it accumulates, and quantises each of eight groups once.
    assert quantisations[-8:] == [(True, True)] * 8
    assert len(quantisations) > 16


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.detach().add_(p.grad, alpha=-0.1),
        lambda p: p.data.add_(p.grad, alpha=-0.1),
        lambda p: setattr(p, "data", p.data - 0.1 * p.grad),
    ],
    ids=["detach", "data", "other memory"],
)
def test_an_optimizer_of_plain_tensor_code_is_noticed(make, batch, write):
    """A write through `data` does not change the version of a parameter."""
    assert_written_weights_are_quantised_again(make, batch, write, steps=1)


def test_frozen_weights_are_quantised_once(make, batch, quantisations):
    model = make().requires_grad_(False)
    model.enable_input_require_grads()
    tigon.patch(model, fp8="rowwise")
    for _ in range(3):
        model(**batch).loss.backward()
    assert len(quantisations) == 2 * 4
    with torch.no_grad():
        model(**batch)
        assert len(quantisations) == 2 * 4
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
        model(**batch)
    assert len(quantisations) > 2 * 4


# --- memory and graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", MEMORY[1:])
@pytest.mark.sampled(2)
def test_each_level_of_memory_gives_the_same_step(make, step, batch, level):
    model, other = make(), make()
    tigon.patch(model, fp8="rowwise")
    tigon.patch(other, fp8="rowwise", memory=level)
    actual, expected = step(other, batch), step(model, batch)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.thorough
def test_a_compiled_model_runs_in_fp8_without_a_graph_break(make, step, batch):
    torch._dynamo.reset()
    model, stock = make(num_hidden_layers=1), make(num_hidden_layers=1)
    tigon.patch(model, fp8="rowwise")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = {name.removeprefix("_orig_mod."): value for name, value in step(compiled, batch).items()}
    expected = step(stock, batch)
    assert_near(actual, expected)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert error(actual[name], expected[name]) > BF16_ERROR
    torch._dynamo.reset()


# --- adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched_first", [False, True], ids=["adapters first", "patch first"])
def test_the_base_of_a_layer_with_adapters_runs_in_fp8(make, step, batch, calls, quantisations, patched_first):
    model, stock = make(), with_lora(make())
    if patched_first:
        tigon.patch(model, fp8="rowwise")
        model = with_lora(model)
    else:
        model = with_lora(model)
        report = tigon.patch(model, fp8="rowwise")
        assert len(layers_in_fp8(report)) == 14
        assert "a low-rank adapter" in set(reasons(report).values())
    expected = step(stock, batch)
    for _ in range(2):
        actual = step(model, batch)
        assert_near(actual, expected)
        model.zero_grad()
    assert len(calls) == 2 * 14
    # Without kernels, the base is called by itself, and each direction quantises its weight. The input of the first
    # query, key and value needs no gradient.
    assert len(quantisations) == 2 * (14 + 14 - 3)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert error(actual[name], expected[name]) > BF16_ERROR


@pytest.mark.parametrize("for_good", [False, True], ids=["merged", "merged for good"])
def test_merged_adapters_are_part_of_the_quantised_weight(make, batch, for_good):
    """PEFT writes to the weight through `data`, so the version of the weight stays."""
    model, twin = (with_lora(make()) for _ in range(2))
    tigon.patch(model, fp8="rowwise")
    model(**batch).loss.backward()
    before = model(**batch).loss
    if for_good:
        model, twin = model.merge_and_unload(), twin.merge_and_unload()
    else:
        model.merge_adapter(), twin.merge_adapter()
    tigon.patch(twin, fp8="rowwise")
    merged, expected = model(**batch).loss, twin(**batch).loss
    assert torch.equal(merged, expected)
    assert error(merged, before) < LOSS_ERROR
