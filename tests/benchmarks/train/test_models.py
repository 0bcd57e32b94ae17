"""A model with adapters trains the adapters alone, a quantised one has 4 bits, and a frozen one trains nothing."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.train.models import ResidentMemory, add_adapters, config_fields, draw_adapters, freeze, quantise
from benchmarks.train.worker import Job, Trainer

pytest.importorskip("peft")

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture
def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16)


def test_only_adapters_are_trained_and_the_head_has_none(model):
    """The experts of a mixture get adapters too."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    mixture = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    # Each of two layers has A and B of four projections of attention, and of three of the MLP or two of the experts.
    for adapted, parts, count in ((add_adapters(model, 4), "mlp", 3), (add_adapters(mixture, 4), "mlp.experts", 2)):
        trained = {name: p.dtype for name, p in adapted.named_parameters() if p.requires_grad}
        assert sum(parts in name for name in trained) == 2 * count * 2
        assert sum("self_attn" in name for name in trained) == 2 * 4 * 2
        assert all("lora_" in name and "lm_head" not in name for name in trained)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_adapters_are_drawn_from_the_seed_with_the_distribution_of_peft(model):
    adapted = add_adapters(model, 4)
    stock = {name: value.clone() for name, value in adapted.state_dict().items()}
    draw_adapters(adapted, 3)
    drawn = {name: value.clone() for name, value in adapted.state_dict().items()}
    draw_adapters(adapted, 3)
    for name, value in adapted.state_dict().items():
        assert torch.equal(value, drawn[name])
        assert torch.equal(value, stock[name]) == ("lora_A" not in name)
        if "lora_A" in name:
            assert value.abs().max().item() == pytest.approx(value.shape[1] ** -0.5, rel=0.2)
            assert stock[name].abs().max().item() == pytest.approx(value.shape[1] ** -0.5, rel=0.2)


def test_a_frozen_model_still_computes_gradients_of_its_inputs(model):
    freeze(model)
    assert not any(p.requires_grad for p in model.parameters())
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def test_all_linear_layers_but_the_head_are_quantised(model):
    bnb = pytest.importorskip("bitsandbytes")
    x, layer = torch.randn(3, 32).to(torch.bfloat16), model.model.layers[0].self_attn.q_proj
    stock_output = layer(x)
    quantise(model)
    kinds = [type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert kinds.count(bnb.nn.Linear4bit) == 14
    assert type(model.lm_head) is torch.nn.Linear
    quantised = model.model.layers[0].self_attn.q_proj
    assert quantised.weight.numel() == 32 * 32 // 2
    state = quantised.weight.quant_state
    assert (state.quant_type, state.nested) == ("nf4", True)
    weight = bnb.functional.dequantize_4bit(quantised.weight.data, state)
    output = quantised(x)
    assert torch.equal(output, x @ weight.T)
    assert not torch.equal(output, stock_output)


def train(job: Job) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of four steps, and the facts that the process reports."""
    result = Trainer(job, 0).train()
    return result["losses"], result


@pytest.mark.parametrize("qlora", [False, True])
@pytest.mark.sampled(2)
def test_each_provider_trains_the_same_adapters(tmp_path, qlora):
    if qlora:
        pytest.importorskip("bitsandbytes")
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, torch.randint(64, (4096,)).numpy())
    losses, facts = {}, {}
    for provider in ("stock", "tigon-lean", "frozen"):
        job = Job(
            provider, config_fields(CONFIG), str(tokens), 2, 16, 3, 1, "float32", "cpu", lr=1e-2, lora=4, qlora=qlora
        )
        losses[provider], facts[provider] = train(job)
    assert losses["stock"] == pytest.approx(losses["tigon-lean"], rel=1e-5)
    assert losses["stock"][-1] != pytest.approx(losses["frozen"][-1], rel=1e-5)
    assert losses["stock"][0] == pytest.approx(losses["frozen"][0], rel=1e-5)
    assert "low-rank adapters" in facts["tigon-lean"]["applied"]
    # A parameter of an adapter has 4 bytes, and so has each of its moments in AdamW.
    trained = 2 * 4 * (4 * (32 + 32) + 3 * (32 + 48))
    assert facts["stock"]["state_bytes"] - facts["frozen"]["state_bytes"] == 3 * 4 * trained


def test_resident_memory_is_the_peak_above_the_memory_before(one_thread):
    before = torch.ones(2**23)  # 32 MiB
    memory = ResidentMemory()
    # 64 MiB, freed at once.
    torch.ones(2**24)
    assert 60 * 2**20 < memory.growth() < 80 * 2**20
    del before
