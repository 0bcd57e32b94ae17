"""Tiny hybrids of transformers: their recurrent layers run the ops, in training, packed, with a cache and after it."""

import copy
import pickle
import sys
import types
import warnings

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from graphs.emulation import emulate  # noqa: E402
from hf.same_step import assert_same, assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402
from tigon.recognition.parts import mixers  # noqa: E402

GATED = "gated_delta_rule", "causal convolution; gated delta rule"
KDA = "kda", "causal convolution; Kimi Delta Attention"
# The rule of each type, and what the report says.
RULES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), GATED), "kimi_linear": KDA,
    **dict.fromkeys(("nemotron_h", "falcon_h1", "mamba2"), ("ssd", "causal convolution; state space dual")),
}  # fmt: skip
# The mixer of qwen3_5_moe_text is that of qwen3_5_text, and the one of qwen3_next resembles it, as those of falcon_h1
# and mamba2 resemble that of nemotron_h. The reference of Kimi Delta Attention takes seconds, and test_all_types.py
# trains its model in `make test`.
SLOW = "qwen3_5_moe_text", "kimi_linear", "qwen3_next", "falcon_h1", "mamba2"
TYPES = [pytest.param(name, marks=[pytest.mark.thorough] * (name in SLOW)) for name in RULES]
TOKENS = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(9), torch.arange(7)])[None]
BOUNDARIES = torch.tensor([0, 9, 16], dtype=torch.int32)
PACKED = {"positions": {}, "boundaries": {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES}}

pytestmark = pytest.mark.no_interpreter("It compares with stock models on the CPU.")


@pytest.fixture
def op_calls(monkeypatch) -> list[str]:
    """Return the list to which each call of an op adds its name."""
    recorded: list[str] = []

    def count(name: str) -> None:
        op = getattr(mixers, name)
        monkeypatch.setattr(mixers, name, lambda *args, **kwargs: recorded.append(name) or op(*args, **kwargs))

    for name in ("gated_delta_rule", "kda", "ssd", "causal_conv1d"):
        count(name)
    return recorded


def _patch(model, **options) -> tigon.hf.Report:
    """Replace the recurrent layers alone."""
    others = dict.fromkeys(("rms_norm", "glu", "mlp", "experts", "rope", "fused_statements", "loss"), False)
    return tigon.patch(model, **(others | options))


@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_stock_and_restore_is_exact(model_type, op_calls):
    model, batch = tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = _patch(model)
    ((entry,),) = [[e for e in report.entries if e.part == "mixers"]]
    assert (entry.replaced, entry.detail) == (True, RULES[model_type][1])
    assert_within_noise(step(model, batch), expected, allowed, report)
    assert op_calls
    report.restore()
    op_calls.clear()
    restored = step(model, batch)
    assert all(torch.equal(restored[name], value) for name, value in expected.items())
    assert not op_calls


@pytest.mark.parametrize("model_type", ["qwen3_next", pytest.param("olmo_hybrid", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", ["lean", "checkpoint+attention"])
def test_levels_of_memory_have_the_bits_of_the_default_level(model_type, level, op_calls):
    """Fused statements keep the ops."""
    default, model, batch = tiny_model(model_type), tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(default, batch)
    allowed, report = noise(default, batch, expected), _patch(default, fused_statements=True)
    _patch(model, memory=level, fused_statements=True)
    assert_within_noise(step(default, batch), expected, allowed, report)
    expected = step(default, batch)
    op_calls.clear()
    assert all(torch.equal(value, expected[name]) for name, value in step(model, batch).items())
    # A checkpointed layer runs a second time.
    count = 1 + level.startswith("checkpoint")
    assert [op_calls.count(name) for name in ("gated_delta_rule", "causal_conv1d")] == [count, count]


def _with_adapters():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    names = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    return peft.get_peft_model(tiny_model("qwen3_5_text"), config).train()


def test_adapters_of_the_projections_are_fused_around_the_ops(op_calls):
    model, batch = _with_adapters(), make_batch(VOCABULARY)
    expected = step(model, batch)
    report = _patch(model)
    replaced = {entry.part: entry.count for entry in report.entries if entry.replaced}
    assert (replaced["adapters"], replaced["mixers"]) == (5, 1)
    assert_within_noise(step(model, batch), expected, noise(model, batch, expected), report)
    assert {"gated_delta_rule", "causal_conv1d"} == {*op_calls}


def test_graphs_replay_packed_samples_but_for_those_that_only_positions_show(monkeypatch):
    """The host computes their boundaries, which no graph can contain, so no capture is tried."""
    emulate(monkeypatch)
    model = tiny_model("qwen3_5_text").train()
    eager = copy.deepcopy(model)
    tigon.patch(eager)
    record = tigon.patch(model, graphs=True).graphs
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    packed = {**batch, "position_ids": POSITIONS, "use_cache": False}
    for _ in range(4):
        assert_same(step(model, packed), step(eager, packed))
        assert_same(step(model, batch), step(eager, batch))
    assert record.eager["its recurrent layers need the boundaries of packed samples: pass cu_seq_lens_q"] == 4
    # Calls without positions, or with boundaries, are captured.
    assert (len(record.captured), record.replayed) == (1, 2)
    for _ in range(4):
        assert_same(*(step(each, {**packed, **PACKED["boundaries"]}) for each in (model, eager)))
    assert len(record.captured) == 2


@pytest.mark.parametrize("model_type", TYPES)
def test_generation_with_a_cache_is_stock(model_type, op_calls):
    stock = tiny_model(model_type).eval()
    model = copy.deepcopy(stock)
    _patch(model)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, ours = (each.generate(TOKENS.repeat(2, 1), **options) for each in (stock, model))
    assert torch.equal(ours.sequences, expected.sequences)
    assert all(map(torch.equal, ours.logits, expected.logits))
    assert not op_calls
    # A training loop that does not set `use_cache` builds a cache, too.
    model(TOKENS, labels=TOKENS).loss.backward()
    assert {*op_calls} == {RULES[model_type][0], "causal_conv1d"}


@pytest.mark.parametrize("arguments", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.sampled(2)
def test_packed_samples_are_independent(model_type, arguments):
    """The logits and the gradients are those of the samples alone."""
    model = tiny_model(model_type)
    report = _patch(model)
    if model_type == "mamba2":
        # Its causal language model passes neither boundaries nor positions on to its body.
        assert any(note.startswith("packed samples are not independent") for note in report.notes)
        return
    assert any(note.startswith("packed samples are independent in ") for note in report.notes)

    def run(tokens, **more):
        model.zero_grad()
        logits = model(tokens, use_cache=False, **more).logits
        return logits, torch.autograd.grad(logits.float().logsumexp(-1).sum(), [*model.parameters()], allow_unused=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed, packed_gradients = run(TOKENS, position_ids=POSITIONS, **arguments)
    (first, first_gradients), (second, second_gradients) = run(TOKENS[:, :9]), run(TOKENS[:, 9:])
    torch.testing.assert_close(packed, torch.cat([first, second], 1), rtol=1e-4, atol=1e-4)
    for ours, a, b in zip(packed_gradients, first_gradients, second_gradients, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(ours, a + b, rtol=1e-3, atol=1e-3 * float((a + b).abs().max()))


def test_copies_run_the_ops_and_separate_samples(op_calls):
    model = tiny_model("qwen3_5_text")
    _patch(model)
    expected = model(TOKENS, use_cache=False, position_ids=POSITIONS).logits
    op_calls.clear()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(other(TOKENS, use_cache=False, position_ids=POSITIONS).logits, expected)
    assert {*op_calls} == {"gated_delta_rule", "causal_conv1d"}


# It takes 20 s to compile. tests/ops/mixers compiles a rule with boundaries in `make test`.
@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [{}, {"cu_seq_lens_q": BOUNDARIES}], ids=["one sample", "packed"])
def test_a_compiled_layer_is_one_graph_with_the_ops(arguments, op_calls):
    model = tiny_model("qwen3_5_text")
    _patch(model)
    layer, hidden = model.model.layers[0].linear_attn, torch.randn(1, 16, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = lambda run: [y := run(hidden, **arguments), *torch.autograd.grad(y.sum(), layer.parameters())]
    expected = results(layer)
    op_calls.clear()
    torch.testing.assert_close(results(compiled), expected)
    # The graph holds the ops. It was made in this call.
    assert {*op_calls} == {"gated_delta_rule", "causal_conv1d"}


def test_autocast_runs_the_ops(op_calls):
    """The convolution gets an input in bf16 and a weight in fp32."""
    model = tiny_model("qwen3_5_text")
    _patch(model)
    stock = tiny_model("qwen3_5_text")
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = (each(TOKENS, use_cache=False).logits for each in (model, stock))
    assert {*op_calls} == {"gated_delta_rule", "causal_conv1d"}
    exact = stock(TOKENS, use_cache=False).logits
    assert (ours - exact).abs().max() <= 2 * (expected - exact).abs().max()


def test_a_function_of_another_package_is_replaced(op_calls, monkeypatch):
    """transformers calls the function of flash-linear-attention in place of its own, if that package is installed."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.qwen3_5 import modeling_qwen3_5

    def chunk_gated_delta_rule(query, key, value, g, beta, cu_seqlens=None, output_final_state=False):
        return torch.zeros_like(value), None

    for name in ("installed", "installed.ops", "installed.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["installed.ops.gated_delta_rule"].chunk_gated_delta_rule = chunk_gated_delta_rule
    model = tiny_model("qwen3_5_text")
    expected = model(TOKENS, use_cache=False).logits
    function = modeling_qwen3_5.torch_chunk_gated_delta_rule.__wrapped__
    dispatch = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "installed")
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", dispatch(function))
    zeros = model(TOKENS, use_cache=False).logits
    assert not torch.allclose(zeros, expected)
    report = _patch(model)
    torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    assert "gated_delta_rule" in op_calls
    report.restore()
    assert torch.equal(model(TOKENS, use_cache=False).logits, zeros)


def test_a_second_call_trains_with_the_states_of_the_first():
    """The cache writes the next state into the tensor that backward reads."""
    stock = tiny_model("nemotron_h").train()
    model = copy.deepcopy(stock)
    _patch(model)
    results = []
    for each in (stock, model):
        cache = each(TOKENS, use_cache=True).past_key_values
        logits = each(TOKENS, past_key_values=cache).logits
        results.append(
            [logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), [*each.parameters()], allow_unused=True)]
        )
    for ours, expected in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_the_ops_run_where_a_kernel_of_another_package_computes_the_whole_mixer(op_calls, monkeypatch):
    """The kernel does not read the boundaries of samples."""
    module = sys.modules[type(tiny_model("nemotron_h")).__module__]
    stock = module.mamba2_split_conv1d_scan_combined

    def fail(*args, **kwargs):
        raise AssertionError

    cells = dict(zip(stock.__code__.co_freevars, stock.__closure__, strict=True))
    monkeypatch.setattr(cells["implementation"], "cell_contents", fail)
    model = tiny_model("nemotron_h").train()
    with pytest.raises(AssertionError):
        model(TOKENS, use_cache=False)
    _patch(model)
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert {*op_calls} == {"ssd", "causal_conv1d"}
