"""Fixtures: tiny models of seven types with random weights, a batch, and a comparison of training steps."""

import copy

import pytest
import torch
from torch import nn

import tigon
from hf import same_step
from hf.copies import copy_of_patched
from remembered import remembers_probes  # noqa: F401
from tigon.ops.fp8 import weights
from tigon.recognition.parts import fp8, fp8_experts

transformers = pytest.importorskip("transformers")

VOCABULARY = 131

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Settings that make each type unusual: head sizes other than hidden / heads, rope on a part of the head, biases, tied
# weights, and soft caps that change the logits.
CONFIGS = {
    "llama": {"head_dim": 32, "mlp_bias": True, "attention_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 7.0, "sliding_window": 4, "query_pre_attn_scalar": 32},
    "phi3": {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass


@pytest.fixture
def fresh_accelerate():
    """Reset the state of accelerate, which belongs to the process."""
    accelerate = pytest.importorskip("accelerate")

    def reset() -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()

    reset()
    yield
    reset()


# The settings of every other type have a meaning for the patch. It treats Mistral like Llama, and Gemma like Gemma 2
# without soft caps; test_all_types.py trains both.
@pytest.fixture(params=[name for name in CONFIGS if name not in ("mistral", "gemma")])
def model_type(request) -> str:
    return request.param


@pytest.fixture
def make_model():
    """Return the function make_model(model_type, dtype, **config).

    It builds a model in training mode with fixed weights.
    """

    def make(model_type: str = "llama", dtype: torch.dtype = torch.float32, **config) -> nn.Module:
        config = transformers.AutoConfig.for_model(model_type, **SIZE | CONFIGS.get(model_type, {}) | config)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        generator = torch.Generator().manual_seed(len(model_type))
        with torch.no_grad():
            for parameter in model.parameters():
                spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                parameter += spread * torch.randn(parameter.shape, generator=generator)
            # The logits are so large that a soft cap, or a missing one, changes the loss.
            model.get_output_embeddings().weight *= 5
        return model.to(dtype).train()

    return make


# Settings of mixtures, whose experts have other sizes than their MLPs. GPT-OSS has transposed weights, biases and a
# clamped gate.
MIXTURES = {
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16},
}  # fmt: skip


@pytest.fixture
def make_bf16(make_model):
    """Return make_bf16(model_type, dtype, **config): it builds a model whose head does not make the loss large."""

    def make(model_type: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **config) -> nn.Module:
        model = make_model(model_type, dtype, **MIXTURES.get(model_type, {}) | config)
        with torch.no_grad():
            model.get_output_embeddings().weight /= 5
        return model

    return make


@pytest.fixture
def fp8_calls(monkeypatch) -> list[tuple[str, int]]:
    """Return a list to which each call of an op in FP8 adds its name and the number of its weights, or of its rows."""
    calls: list[tuple[str, int]] = []

    def watch(module, name: str, count) -> None:
        op = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **kwargs: calls.append((name, count(args))) or op(*args, **kwargs)
        )

    watch(fp8, "fp8_projections", lambda args: len(args[1]))
    watch(fp8, "fp8_glu_mlp", lambda args: len(args) - 1)
    watch(fp8_experts, "moe_mlp_in_fp8", lambda args: args[2].numel())
    return calls


@pytest.fixture
def quantisations(monkeypatch) -> list[tuple[bool, bool]]:
    """Return a list to which each quantisation of weights adds which copies it makes: by rows, and transposed."""
    copies, quantise, quantise_stack = [], weights.quantise, weights.quantise_stack
    record = lambda needs, result: copies.append(tuple(needs)) or result
    monkeypatch.setattr(weights, "quantise", lambda ws, layout: record(layout[1:3], quantise(ws, layout)))
    monkeypatch.setattr(weights, "quantise_stack", lambda *args: record(args[1:], quantise_stack(*args)))
    return copies


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Return three sequences of eleven tokens. One of them is padded, and the first two tokens have no labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (3, 11), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.fixture
def step():
    """Return step(model, batch): it returns the loss and every gradient, by name."""

    return same_step.step


@pytest.fixture
def assert_same_step(step):
    """Return assert_same_step(model, stock, batch): it compares the losses and gradients up to the rounding of sums."""

    return lambda model, stock, batch: same_step.assert_same(step(model, batch), step(stock, batch))


@pytest.fixture
def clone():
    """Return clone(model): it copies a model that is not patched."""
    return copy.deepcopy


@pytest.fixture
def may_copy(request) -> bool:
    """Return True if the patched models of a test may be copies.

    A patch may depend on what `monkeypatch` replaces, and a test with the argument `duplicate` makes its own copies.
    The modules about changes after the patch test the patched model itself, because a copy compares some settings by
    value where the model compares them by identity.
    """
    is_about_changes = request.node.path.stem.endswith("changed_after")
    return not is_about_changes and not {"monkeypatch", "duplicate"} & set(request.fixturenames)


@pytest.fixture
def pair(make_model, clone, may_copy):
    """Return pair(model_type, **config): it builds a patched and a stock model with the same parameters."""

    def make(model_type: str = "llama", change=None, **config):
        model = make_model(model_type, **config)
        if may_copy and change is None:
            return copy_of_patched(make_model, model_type, **config), model
        if change is not None:
            change(model)
        stock = clone(model)
        tigon.patch(model)
        return model, stock

    return make
