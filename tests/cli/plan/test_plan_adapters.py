"""`tigon plan --lora` and `--qlora`: bytes of models with adapters agree with those of a real step and with counts."""

import contextlib
import json
import sys
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("typer")

import tigon  # noqa: E402
from cli.plan.small_llama import NO_OPTIMIZER, SIZES, build_llama, saved_bytes_of  # noqa: E402
from command_work import run_tigon  # noqa: E402
from tigon.cli.inspect.build import build  # noqa: E402
from tigon.cli.plan.adapters import FourBitLinear, add_adapters  # noqa: E402
from tigon.cli.plan.engines import Replicated, Sharded  # noqa: E402
from tigon.cli.plan.planner import NotPlanned, PlanSettings, plan  # noqa: E402
from tigon.cli.plan.step import count_step  # noqa: E402
from tigon.ops.adapters import lora, lora_mlp  # noqa: E402
from tigon.recognition.parts import dequantisation  # noqa: E402

# A quarter of the width that the other tests have, because these tests also run a step on the CPU.
WIDTHS = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 224}
CONFIG = transformers.LlamaConfig(**SIZES | WIDTHS)
RANK, BATCH, SEQ = 8, 2, 64
# The sum of inputs and outputs, and the number of weights, of the seven linear layers of each decoder layer.
FEATURES = 2 * (2 * (64 + 64) + 2 * (64 + 16) + 3 * (64 + 224))
WEIGHTS = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 224)


def adapted_llama(dtype=torch.bfloat16, is_quantised=False):
    model = build_llama(dtype, **WIDTHS)
    add_adapters(model, RANK, torch.float32, is_quantised)
    return model.train()


def step_of(model, level="stock", engine=None):
    # The few rows of this step would keep quantised layers from being dequantised by an op.
    with (
        mock.patch.object(dequantisation, "MIN_ROWS", 1),
        contextlib.nullcontext() if level == "stock" else tigon.patched(model, memory=level),
    ):
        return count_step(model, engine or Replicated(model, 1), NO_OPTIMIZER, BATCH, SEQ)


# --- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level", ["stock", *(pytest.param(x, marks=pytest.mark.interpreter) for x in ("default", "lean"))]
)
def test_saved_bytes_are_what_a_step_saves(level):
    """A real step on the CPU, with the adapters that PEFT makes, saves the bytes that the plan counts."""
    planned_step = step_of(adapted_llama(), level)
    model = transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    ).train()
    options = {} if level == "stock" else {"memory": level}
    actual = saved_bytes_of(model, torch.randint(256, (BATCH, SEQ)), **options)
    assert planned_step.saved_bytes == pytest.approx(actual, rel=0.05)


def test_only_adapters_are_trained_and_are_fp32():
    model = adapted_llama()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert sum(p.numel() for p in trained) == RANK * FEATURES
    step = step_of(model)
    # After backward, only the gradients of the adapters, the tokens and the loss are allocated.
    assert step.peaks[2] - step.fixed == 4 * RANK * FEATURES + 8 * BATCH * SEQ + 512


def test_adding_adapters_changes_no_random_state():
    before = torch.random.get_rng_state()
    adapted_llama()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("is_quantised", [False, True], ids=["lora", "qlora"])
@pytest.mark.parametrize("level", ["default", "lean", "checkpoint"])
def test_adapted_layers_run_as_ops(level, is_quantised, monkeypatch):
    nodes = set()
    for node in (lora._LoRALinears, lora._AddAdapters, lora_mlp._LoRAGLUMLP):
        apply = node.apply
        spy = lambda *args, node=node, apply=apply: (nodes.add(node.__name__), apply(*args))[1]
        monkeypatch.setattr(node, "apply", staticmethod(spy))
    step_of(adapted_llama(is_quantised=is_quantised), level)
    assert nodes == {"_LoRALinears", "_LoRAGLUMLP"}


CHOICES, INNER = 2, 96
EXPERTS_CONFIG = transformers.Qwen3MoeConfig(
    **SIZES | WIDTHS, head_dim=16, moe_intermediate_size=INNER, num_experts=8, num_experts_per_tok=CHOICES
)


@pytest.mark.parametrize("has_adapters", [False, True], ids=["full", "lora"])
def test_the_first_product_of_experts_is_not_saved_if_it_is_recomputed(has_adapters):
    """All layers are mixtures, so nothing else differs between the levels, except for the low-rank product p."""
    steps, layers = {}, EXPERTS_CONFIG.num_hidden_layers
    for level in ("lean", "lean+mlp:1", "lean+mlp"):
        model, _ = build(EXPERTS_CONFIG, attention=None)
        model = model.to(torch.bfloat16)
        if has_adapters:
            add_adapters(model, RANK, torch.float32, False)
        steps[level] = step_of(model.train(), level)
    rows = BATCH * SEQ * CHOICES
    saved_sizes = [step.saved_bytes for step in steps.values()]
    # p has two terms in bf16, and PEFT gives an adapter of gate and up twice the rank.
    size = rows * (2 * INNER + (2 * 2 * RANK if has_adapters else 0)) * 2
    assert [saved_sizes[0] - x for x in saved_sizes[1:]] == [size, layers * size]
    products = [sum(work.products for work in step.work) for step in steps.values()]
    # The plan does not count the work of low-rank kernels.
    assert products[1] - products[0] == 2 * rows * 64 * 2 * INNER
    assert products[2] - products[0] == layers * (products[1] - products[0])


def test_adapters_of_experts_run_as_ops_without_the_sum_of_weights():
    """PEFT adds the products of the adapters to the weights of all experts, in a copy that backward needs."""
    steps = {}
    for level in ("stock", "lean"):
        model, _ = build(EXPERTS_CONFIG, attention=None)
        add_adapters(model.to(torch.bfloat16), RANK, torch.float32, False)
        steps[level] = step_of(model.train(), level)
    weights = 2 * 8 * 3 * 64 * 96
    assert steps["stock"].fixed == steps["lean"].fixed
    assert steps["stock"].peak - steps["lean"].peak > 2 * weights


@pytest.mark.parametrize("level", ["stock", "lean"])
def test_four_bits_take_fewer_bytes(level):
    lora_step, qlora_step = (step_of(adapted_llama(is_quantised=q), level) for q in (False, True))
    # Each weight takes 4 bits instead of 16. Every 64 weights share one byte, and every 64 * 256 share 4 bytes.
    # The allocator rounds the size of each tensor up to a multiple of 512 bytes.
    packed = WEIGHTS / 2 + WEIGHTS / 64 + WEIGHTS / 64 / 256 * 4
    assert lora_step.fixed - qlora_step.fixed == pytest.approx(2 * WEIGHTS - packed, abs=14 * 3 * 512)
    # A dequantised weight is not saved for backward.
    assert qlora_step.saved_bytes <= lora_step.saved_bytes


def test_four_bits_are_those_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(256, 512)
    quantised, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    ours = FourBitLinear(512, 256, None, torch.bfloat16)
    assert ours.weight.shape == quantised.shape
    assert (ours.scales.nbytes, ours.scales_of_scales.nbytes) == (state.absmax.nbytes, state.state2.absmax.nbytes)


def test_a_product_of_four_bits_frees_the_dequantised_weight():
    from tigon.cli.plan.ledger import Ledger

    layer, x = FourBitLinear(1024, 2048, None, torch.float32), torch.empty(4, 1024, device="meta", requires_grad=True)
    with Ledger() as ledger:
        y = layer(x)
        assert ledger.peak >= 4 * 2048 * 1024 > ledger.live
        ledger.peak = ledger.live
        (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert ledger.peak >= 4 * 2048 * 1024 > ledger.live
    assert dx.shape == x.shape


# --- engines ---------------------------------------------------------------------------------------


def test_ddp_exchanges_only_gradients_of_adapters():
    model = adapted_llama()
    engine = Replicated(model, 2)
    assert engine.buckets == 4 * RANK * FEATURES
    assert engine.exchanged == (0, 4 * RANK * FEATURES)


@pytest.mark.parametrize("is_quantised", [False, True], ids=["lora", "qlora"])
def test_fsdp_gathers_all_parameters_and_scatters_gradients_of_adapters(is_quantised):
    model = adapted_llama(is_quantised=is_quantised)
    engine = Sharded(model, 2, torch.bfloat16)
    total = sum(p.nbytes for p in model.parameters())
    assert engine.exchanged == (total // 2, (total + 4 * RANK * FEATURES) // 2)
    step = step_of(model, "lean", engine)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    # The shards have the dtypes of the parameters: bf16, fp32 for adapters, and one byte for two weights of 4 bits.
    assert step.fixed == pytest.approx(total / 2 + buffers, abs=14 * 2 * 512 + 1024)
    # After backward, the shards of the gradients, the tokens and the loss are allocated.
    assert step.peaks[2] - step.fixed == 4 * RANK * FEATURES / 2 + 8 * BATCH * SEQ + 512


def test_the_dtype_mixed_has_fp32_shards():
    settings = PlanSettings(SEQ, strategy="fsdp", dtype="mixed", lora=RANK)
    step = next(plan(CONFIG, settings, levels=("default",), search=False)).step
    parameters = sum(p.numel() for p in adapted_llama().parameters())
    # AdamW has two fp32 moments for each trained parameter.
    assert step.fixed == pytest.approx(4 * parameters + 2 * 4 * RANK * FEATURES, rel=0.01)


# --- settings and the command ------------------------------------------------------------------------


def test_a_model_that_peft_refuses_is_refused(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("no layer fits")

    monkeypatch.setattr(peft, "get_peft_model", refuse)
    with pytest.raises(NotPlanned, match=r"LlamaForCausalLM cannot get adapters \(ValueError: no layer fits\)"):
        next(plan(CONFIG, PlanSettings(SEQ, lora=RANK)))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    CONFIG.save_pretrained(tmp_path)
    return lambda *arguments: run_tigon("plan", tmp_path, *arguments)


@pytest.mark.parametrize("options", [("--qlora",), ()], ids=["qlora", "lora"])
@pytest.mark.sampled(2)
def test_the_command_says_what_is_trained(run, tmp_path, options):
    file = tmp_path / "plan.json"
    arguments = ("--seq", "128", "--batch", "1", "--gpu-memory", "1.1", "--json", str(file))
    result = run("--lora", "8", *options, *arguments)
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert f"{'QLoRA' if options else 'LoRA'} of rank 8" in output
    assert "Only adapters (LoRA) of rank 8 are trained." in output
    assert ("take 4 bits" in output) == bool(options)
    data = json.loads(file.read_text())
    assert (data["settings"]["lora"], data["settings"]["qlora"]) == (8, bool(options))
    assert data["notes"][0].startswith("Only adapters (LoRA) of rank 8 are trained.")


def test_the_command_names_peft_if_it_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    result = run("--lora", "8")
    assert result.exit_code == 2
    assert "--lora: needs peft: pip install 'peft>=0.19.1'" in " ".join(result.output.split())
