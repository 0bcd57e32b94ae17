"""The estimates of `tigon plan` are within 10 % of the peak of the allocator of a GPU, at every level."""

import gc

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tigon  # noqa: E402
from tigon.cli.plan.planner import STOCK, PlanSettings, plan  # noqa: E402
from tigon.memory.levels import MEMORY  # noqa: E402

SIZES = {
    "vocab_size": 64000, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
BATCH, SEQ = 4, 2048


def measure_peak(config, level):
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if level != STOCK:
        tigon.patch(model, memory=level)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, SEQ), device="cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("level", [STOCK, *MEMORY])
@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.Qwen3Config], ids=lambda kind: kind.model_type)
def test_an_estimate_is_within_ten_percent(kind, level):
    config, settings = kind(**SIZES), PlanSettings(SEQ, batch=BATCH)
    row = next(plan(config, settings, levels=(level,), search=False))
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert row.step.peak == pytest.approx(measure_peak(config, level) - before, rel=0.1)
