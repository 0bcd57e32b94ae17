"""`tigon plan`: its bytes agree with counts by hand and with a real step; its search, errors and command work."""

import dataclasses
import itertools
import math
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")


import tigon  # noqa: E402
from cli.plan.small_llama import NO_OPTIMIZER, SIZES, build_llama, on_meta, saved_bytes_of  # noqa: E402
from memory.steps import paged  # noqa: E402
from tigon.cli.plan.engines import Replicated, Sharded, optimizer_costs  # noqa: E402
from tigon.cli.plan.ledger import Ledger, Work  # noqa: E402
from tigon.cli.plan.planner import LevelPlan, NotPlanned, PlanSettings, _largest, plan, recommend  # noqa: E402
from tigon.cli.plan.step import Step, count_step  # noqa: E402
from tigon.memory.levels import MEMORY  # noqa: E402
from tigon.ops.mlps import tiled_glu_mlp  # noqa: E402
from tigon.runtime.device import runs_kernels  # noqa: E402

# The sequences of a step, and the tokens of each.
BATCH, SEQ = 4, 256
# The bytes of the hidden states of a step in bf16.
UNIT = 256 * 2 * BATCH * SEQ


def step_of(model, batch=BATCH, seq=SEQ, engine=None, optimizer=NO_OPTIMIZER, **options):
    if not options:
        return count_step(model, engine or Replicated(model, 1), optimizer, batch, seq)
    with tigon.patched(model, **options):
        return count_step(model, engine or Replicated(model, 1), optimizer, batch, seq)


def bytes_of_layer(**options):
    """Return the bytes that one layer saves: the difference between models of three and of two layers."""
    three, two = (step_of(build_llama(num_hidden_layers=n), **options) for n in (3, 2))
    return three.saved_bytes - two.saved_bytes


# --- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "units"), [("default", 13.5), ("lean", 11.5), ("checkpoint", 1.0), ("checkpoint+attention", 2.0)]
)
def test_a_layer_saves_the_expected_bytes(memory, units):
    fp32 = 4 * BATCH * SEQ
    # A layer also saves one fp32 number for each row of attention and of its two norms.
    numbers_of_row = {"default": 4 + 2, "lean": 4 + 2, "checkpoint": 0, "checkpoint+attention": 4}[memory]
    assert bytes_of_layer(memory=memory) == units * UNIT + numbers_of_row * fp32


FEW = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 224, "vocab_size": 128}
RECURRENT = {"layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES | FEW),
    "hybrid": lambda: transformers.Qwen3_5TextConfig(**SIZES | FEW | RECURRENT),
}


@pytest.mark.parametrize(
    ("memory", "name"),
    [
        *itertools.product(["stock"], CONFIGS),
        *(pytest.param(*case, marks=pytest.mark.interpreter) for case in (("default", "llama"), ("lean", "hybrid"))),
    ],
)
def test_saved_bytes_are_what_a_step_saves(memory, name):
    """A real step on the CPU saves the bytes that the plan counts."""
    options = {} if memory == "stock" else {"memory": memory}
    planned_step = step_of(on_meta(CONFIGS[name](), torch.float32), 1, 64, **options)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).train()
    actual = saved_bytes_of(model, torch.randint(128, (1, 64)), **options)
    assert planned_step.saved_bytes == pytest.approx(actual, rel=0.05)


def test_saved_outputs_of_attention_are_what_a_step_saves():
    """On the CPU too, the kernel of attention returns its output and one fp32 number for each row."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 224, "vocab_size": 128}
    tokens, actual, planned = torch.randint(128, (2, 64)), [], []
    for memory in ("checkpoint", "checkpoint+attention"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes})).train()
        actual.append(saved_bytes_of(model, tokens, memory=memory))
        planned.append(step_of(build_llama(torch.float32, **sizes), 2, 64, memory=memory).saved_bytes)
    assert planned[1] - planned[0] == actual[1] - actual[0] == 2 * 2 * 64 * (64 + 4) * 4


def test_each_level_saves_fewer_bytes_than_the_one_before():
    # The last layer of a checkpointed model is not checkpointed, so the model has several.
    model = build_llama(num_hidden_layers=6)
    steps = {level: step_of(model, 256, 4096, memory=level) for level in MEMORY}
    saved_sizes = [steps[level].saved_bytes for level in ("default", "lean", "lean+mlp", "checkpoint")]
    assert saved_sizes == sorted(saved_sizes, reverse=True)
    assert len(set(saved_sizes)) == 4
    assert steps["checkpoint+offload"].host > 0 == steps["lean"].host
    work = {level: sum(w.products for w in step.work) for level, step in steps.items()}
    assert work["default"] == work["lean"] < work["lean+mlp"] < work["checkpoint"] == work["checkpoint+attention"]
    attention = {level: sum(w.attention for w in step.work) for level, step in steps.items()}
    # Backward has five products where the forward pass has two, and the last of six layers runs once.
    assert attention["checkpoint"] == attention["default"] * (7 + 2 * 5 / 6) / 7
    assert attention["checkpoint+attention"] == attention["checkpoint+attention+offload"] == attention["default"]
    assert steps["checkpoint"].saved_bytes < steps["checkpoint+attention"].saved_bytes < steps["lean+mlp"].saved_bytes


def test_inputs_of_checkpointed_layers_are_on_the_host():
    """The last of six layers runs once. The gradients of the others take less than one input."""
    model, one = build_llama(num_hidden_layers=6), 256 * 4096 * 256 * 2
    checkpoint, offload = (step_of(model, 256, 4096, memory=level) for level in ("checkpoint", "checkpoint+offload"))
    assert checkpoint.host == 0
    assert offload.host == 5 * one
    assert checkpoint.saved_bytes - offload.saved_bytes == 5 * one
    assert [work.to_host for work in offload.work] == [5 * one, 5 * one, 0]
    # In a layer of five, the GPU holds its own input, and the one that is copied back ahead.
    assert checkpoint.peak - offload.peak == pytest.approx(3 * one, rel=0.01)
    assert step_of(model, 256, 4096, memory="checkpoint+offload:2").host == 2 * one


def test_outputs_of_attention_are_on_the_host():
    """Each of 4 heads has one fp32 number for a token. Pages have 16 MiB."""
    model, one, rows = build_llama(num_hidden_layers=6), 256 * 4096 * 256 * 2, 256 * 4096 * 4 * 4
    step = step_of(model, 256, 4096, memory="checkpoint+attention+offload")
    assert step.host == 5 * (2 * one + rows)
    assert [work.to_host for work in step.work] == [step.host, step.host, 0]
    assert step_of(model, 256, 4096, memory="checkpoint+attention:2+offload").host == 5 * one + 2 * (one + rows)
    assert step_of(model, 256, 4096, memory="checkpoint+attention:2+offload:1").host == one
    inputs_alone = step_of(model, 256, 4096, memory="checkpoint+offload")
    assert step.saved_bytes == inputs_alone.saved_bytes
    # The GPU holds the outputs of one more layer, which are copied back ahead.
    assert step.peak - inputs_alone.peak == pytest.approx(one + rows, rel=0.01)


@pytest.mark.parametrize("gpus", [1, 4])
def test_inputs_stay_on_the_gpu_where_gradients_need_the_memory_later(gpus):
    """Each GPU has the gradients of its own shards."""
    model = build_llama(num_hidden_layers=6)
    gradient_bytes = 5 * sum(p.nbytes for p in model.model.layers[0].parameters()) // gpus
    tokens = 6144 // gpus
    one = tokens * 256 * 2
    stay = gradient_bytes // one
    assert stay == 2
    engine = Replicated(model, 1) if gpus == 1 else Sharded(model, gpus, torch.bfloat16)
    with paged(2**18, 2**18):
        assert step_of(model, 1, tokens, engine=engine, memory="checkpoint+offload").host == (5 - stay) * one


def test_large_mlps_are_computed_in_tiles():
    """Three tensors of all tokens and features of the MLP become three of a tile."""
    model, tokens = build_llama(num_hidden_layers=3), 2**22
    steps = []
    for tile_bytes in (2**32, 2**60):
        with mock.patch.object(tiled_glu_mlp, "TILE_BYTES", tile_bytes):
            steps.append(step_of(model, tokens // 4096, 4096, memory="checkpoint"))
    tiled, whole = steps
    # Without tiles, the peak of the layer is in its MLP. With tiles, it is in attention, so not all bytes are saved.
    assert whole.peak - tiled.peak > 0.5 * 3 * tokens * model.config.intermediate_size * 2
    work = [sum(w.products for w in step.work) for step in steps]
    # Only the last layer computes gate and up twice, which are 2 of its products.
    assert work[0] - work[1] == 2 * 2 * tokens * model.config.hidden_size * model.config.intermediate_size


def test_stock_holds_the_logits():
    model = build_llama(vocab_size=32768)
    assert step_of(model).peak - step_of(model, memory="default").peak > 4 * 32768 * BATCH * SEQ


def test_a_step_does_not_change_the_model():
    model = build_llama()
    before = [name for name, _ in model.named_modules()]
    first, second = step_of(model, memory="lean"), step_of(model, memory="lean")
    assert first == second
    assert [name for name, _ in model.named_modules()] == before
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not runs_kernels(torch.empty(4, device="meta"))


def test_frozen_weights_have_no_gradients():
    model, frozen = build_llama(), build_llama()
    for p in frozen.model.parameters():
        p.requires_grad_(False)
    gradient_bytes = sum(p.nbytes for p in model.model.parameters())
    assert step_of(model).peaks[2] - step_of(frozen).peaks[2] == gradient_bytes


# --- engines ---------------------------------------------------------------------------------------


def test_optimizers_have_the_expected_state():
    sizes, n = [1000, 3000], 4000
    assert optimizer_costs("adamw", sizes, torch.bfloat16).state == 2 * 2 * n
    foreach = optimizer_costs("adamw-foreach", sizes, torch.float32)
    assert 2 * 4 * n <= foreach.state <= 2 * 4 * n + 4096
    assert foreach.temporary >= 4 * n
    assert optimizer_costs("sgd", sizes, torch.float32).state == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw-8bit", {"state": "8bit"}),
        ("adamw-8bit+24", {"state": "8bit", "master": "bf16+8"}),
        ("adamw-fp32+32", {"state": "fp32", "master": "fp32"}),
        ("adamw-fp32", {"state": "fp32"}),
    ],
)
def test_formats_of_states_have_the_size_of_the_optimizer(name, options, dtype):
    sizes = [5001, 300]
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    optimizer = tigon.AdamW(parameters, **options)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
    assert optimizer_costs(name, sizes, dtype).state == sum(x.nbytes for x in states)


def test_fsdp_shards_parameters_and_gathers_layers():
    model = build_llama(num_hidden_layers=6, vocab_size=4096)
    nbytes = sum(p.nbytes for p in model.parameters())
    steps = {n: step_of(model, engine=Sharded(model, n, torch.bfloat16), memory="lean") for n in (2, 4)}
    buffers = step_of(model, memory="lean").fixed - nbytes
    assert steps[2].fixed == pytest.approx(nbytes / 2 + buffers, abs=1024)
    assert steps[4].fixed == pytest.approx(nbytes / 4 + buffers, abs=1024)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert steps[4].peaks[0] - steps[4].fixed - steps[4].saved_bytes > layer
    assert steps[4].peak < steps[2].peak < step_of(model, memory="lean").peak
    # After backward, a shard of the gradients is allocated in addition to the shard of the parameters.
    assert steps[4].peaks[2] - steps[4].fixed == pytest.approx(nbytes / 4, rel=0.05)


def test_the_dtype_mixed_has_fp32_shards():
    config = transformers.LlamaConfig(**SIZES)
    bf16, mixed = (
        next(plan(config, PlanSettings(128, strategy="fsdp", dtype=dtype), levels=("default",), search=False))
        for dtype in ("bf16", "mixed")
    )
    assert mixed.step.fixed == pytest.approx(2 * bf16.step.fixed, rel=0.01)
    assert mixed.step.saved_bytes == bf16.step.saved_bytes


# --- arithmetic ------------------------------------------------------------------------------------


def test_attention_is_counted_and_saves_no_scores():
    q = torch.empty(2, 4, 512, 64, device="meta", requires_grad=True)
    with Ledger() as ledger:
        ledger.count(q)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
        assert ledger.work.attention == 4 * 2 * 4 * 512 * 512 * 64 // 2
        assert ledger.peak < 3 * q.nbytes


def test_the_products_of_a_step_are_counted():
    model = build_llama()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1) - model.model.embed_tokens.weight.numel()
    products = sum(work.products for work in step_of(model, memory="default").work)
    # The angles of the rotary embedding are products too.
    assert products == pytest.approx(6 * weights * BATCH * SEQ, rel=1e-4)


# --- the largest batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 0.0017, 1e-6], ids=str)
@pytest.mark.parametrize("first", [1, 5000])
@pytest.mark.parametrize("kind", ["steps", "doublings on the host", "never"])
def test_the_search_finds_the_largest_batch(size, first, kind):
    """The memory has a floor and grows in steps; or memory of the host doubles; or no batch fits."""
    settings, batches = PlanSettings(256, gpu_memory=1.0, reserve=0.0, host_memory=1.0), []

    def count(batch):
        batches.append(batch)
        nbytes = int(2**30 * (batch + batch // 16 / 3) * size)
        host = 2 ** math.ceil(math.log2(2**30 * batch * 3 * size)) if "host" in kind else 0
        floor = 2**31 if kind == "never" else 2**28
        return Step(batch, 256, 0, nbytes, host, (nbytes // 2, nbytes, floor), (Work(),) * 3)

    largest = _largest(count, first, settings)
    assert len(batches) <= 32
    if largest is None:
        assert settings.load(count(1)) > 1.0
    else:
        assert settings.load(largest) <= 1.0
        assert largest.batch == 2**16 or settings.load(count(largest.batch + 1)) > 1.0


def test_the_largest_batch_of_a_model_fits_and_the_next_one_does_not():
    config, settings = transformers.LlamaConfig(**SIZES), PlanSettings(256, batch=2, gpu_memory=0.3, reserve=0.0)
    level_plan = next(plan(config, settings, levels=("lean",)))
    model = build_llama()
    optimizer = optimizer_costs("adamw", [p.numel() for p in model.parameters()], torch.bfloat16)
    peaks = [
        step_of(model, level_plan.largest.batch + more, 256, optimizer=optimizer, memory="lean").peak for more in (0, 1)
    ]
    assert peaks[0] == level_plan.largest.peak <= settings.budget < peaks[1]


def test_recommended_is_the_fastest_that_fits():
    step = step_of(build_llama())
    settings = PlanSettings(256, gpu_memory=step.peak / 2**30, reserve=0.0)
    big = dataclasses.replace(step, peaks=(2 * step.peak, 0, 0))
    plans = [
        LevelPlan("default", big, None, speed=1.0),
        LevelPlan("lean", step, step, speed=0.9, largest_speed=0.9),
        LevelPlan("checkpoint", step, step, speed=0.7, largest_speed=1.1),
    ]
    assert recommend(plans, settings, has_batch=True).level == "lean"
    assert recommend(plans, settings, has_batch=False).level == "checkpoint"
    assert recommend(plans[:1], settings, has_batch=True) is None


# --- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"seq": 0}, "seq must be an integer of at least 1, got 0"),
        ({"gpus": -1}, "gpus must be"),
        ({"batch": 0}, "batch must be"),
        ({"lora": 0}, "lora must be an integer of at least 1, got 0"),
        ({"gpu_memory": 0.0}, "gpu_memory must be a positive number of GiB, got 0.0"),
        ({"gpu_memory": float("nan")}, "gpu_memory must be a positive"),
        ({"gpu_memory": 1.0}, "gpu_memory must leave memory for tensors"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, .*got 'lion'"),
        ({"dtype": "int8"}, "dtype must be one of bf16"),
        ({"strategy": "zero"}, "strategy must be one of single, ddp, fsdp, got 'zero'"),
        ({"strategy": "single", "gpus": 2}, "strategy single needs one GPU, got 2"),
        ({"dtype": "mixed"}, "dtype mixed needs strategy fsdp"),
        ({"reserve": 999.0}, "reserve must be from 0"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        PlanSettings(**{"seq": 128, **setting})


def test_a_model_that_cannot_be_trained_is_refused():
    with pytest.raises(NotPlanned, match="T5ForConditionalGeneration.*decoder_start_token_id"):
        next(plan(transformers.T5Config(num_layers=1), PlanSettings(16)))
