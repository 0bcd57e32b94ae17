"""`tigon.patch(model, fp8=...)`: which linear layers run in FP8, which of them are one op, and when they are quantised.

Most models here are smaller than the limit for the width of a layer, so the limit is lowered for them.
"""

import pytest
import torch
from torch import nn

import tigon
from hf.changes import with_adapters
from hf.fp8_steps import BF16_ERROR, GRADIENT_ERROR, assert_near, error, layers_in_fp8, reasons
from tigon.hf import fp8
from tigon.recognition.replacement import find_replacement

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.no_interpreter(reason="the interpreter computes products of bf16 wrongly")


@pytest.fixture(autouse=True)
def _any_width(monkeypatch):
    monkeypatch.setattr(fp8, "NARROWEST", 1)


def test_layers_with_one_input_and_gated_mlps_are_single_ops(make_bf16, step, batch, fp8_calls):
    model = make_bf16("qwen3")
    tigon.patch(model, fp8="rowwise")
    step(model, batch)
    layer = [("fp8_projections", 3), ("fp8_projections", 1), ("fp8_glu_mlp", 3)]
    assert fp8_calls == 2 * layer


@pytest.mark.parametrize("part", ["fused_statements", "glu"])
def test_other_parts_may_be_left_out(make_bf16, step, batch, fp8_calls, part):
    model, stock = make_bf16("qwen3"), make_bf16("qwen3")
    tigon.patch(model, fp8="rowwise", **{part: False})
    assert_near(step(model, batch), step(stock, batch))
    assert ("fp8_projections", 1) in fp8_calls
    assert (("fp8_glu_mlp", 3) in fp8_calls) == (part != "glu")


def test_the_report_has_a_line_for_each_reason(make_bf16, monkeypatch):
    monkeypatch.setattr(fp8, "NARROWEST", 32)
    model = make_bf16("qwen2_moe", shared_expert_intermediate_size=200)
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


def test_layers_that_are_no_plain_linear_or_have_another_forward_stay(make_bf16):
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
    model = make_bf16()
    layer = model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    report = tigon.patch(model, fp8="rowwise")
    assert "its forward was already replaced" in reasons(report)["model.layers.0.self_attn.q_proj"]
    assert "model.layers.1.self_attn.q_proj" in layers_in_fp8(report)


def test_a_gpu_without_fp8_units_is_refused(make_bf16, monkeypatch):
    """The weights pretend to be on a GPU."""
    model = make_bf16()
    monkeypatch.setattr(fp8, "has_fp8_units", lambda weight: False)
    monkeypatch.setattr(fp8, "_device_of", lambda layer: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    message = r"patch: fp8='rowwise' needs a GPU with FP8 units, got NVIDIA A100 of compute capability 8\.0"
    with pytest.raises(ValueError, match=message):
        tigon.patch(model, fp8="rowwise")
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_short_call_without_gradients_is_that_of_bf16(make_bf16, fp8_calls):
    model, stock = make_bf16(), make_bf16()
    tigon.patch(model, fp8="rowwise", loss=False)
    tokens = torch.randint(3, 131, (1, 11))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, stock(tokens).logits)
        assert not fp8_calls
        model(torch.randint(3, 131, (32, 16)))
    assert len(fp8_calls) == 6


def test_hooks_of_a_layer_run(make_bf16, step, batch, fp8_calls):
    model = make_bf16()
    tigon.patch(model, fp8="rowwise")
    shapes = []
    layer = model.model.layers[0]
    for module in (layer.self_attn.q_proj, layer.mlp.up_proj):
        module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    step(model, batch)
    assert shapes == [(3, 11, 128), (3, 11, 112)]
    # The layers of the first decoder layer run one by one, and all of them in FP8.
    assert fp8_calls[:7] == [("fp8_projections", 1)] * 7


def test_another_forward_of_all_linear_layers_is_used(make_bf16, batch, fp8_calls, monkeypatch):
    model = make_bf16()
    tigon.patch(model, fp8="rowwise")
    count = []
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: count.append(1) or stock(self, x))
    model(**batch)
    assert not fp8_calls
    assert len(count) >= 14


def train(model: nn.Module, batch: dict, micro_batches: int, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(micro_batches):
        model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_level_of_memory_keeps_no_copies_unless_steps_accumulate(make_bf16, batch, quantisations):
    model = make_bf16()
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


@pytest.mark.parametrize("patched_first", [False, True], ids=["adapters first", "patch first"])
def test_the_base_of_a_layer_with_adapters_runs_in_fp8(make_bf16, step, batch, fp8_calls, quantisations, patched_first):
    model, stock = make_bf16(), with_adapters(make_bf16(), r=8)
    if patched_first:
        tigon.patch(model, fp8="rowwise")
        model = with_adapters(model, r=8)
    else:
        model = with_adapters(model, r=8)
        report = tigon.patch(model, fp8="rowwise")
        assert len(layers_in_fp8(report)) == 14
        assert "a low-rank adapter" in set(reasons(report).values())
    expected = step(stock, batch)
    for _ in range(2):
        actual = step(model, batch)
        assert_near(actual, expected)
        model.zero_grad()
    assert len(fp8_calls) == 2 * 14
    # Without kernels, the base is called by itself, and each direction quantises its weight. The input of the first
    # query, key and value needs no gradient.
    assert len(quantisations) == 2 * (14 + 14 - 3)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert error(actual[name], expected[name]) > BF16_ERROR
