"""Fifty steps on real text in bf16: the patched loss differs from stock as two stock runs in other orders differ."""

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from benchmarks.train.text import batches, read_text, tokenise  # noqa: E402
from hf.ways import PARTS  # noqa: E402

STEPS, ROWS, LENGTH, VOCABULARY = 50, 8, 256, 16384
SIZE = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": LENGTH, "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[torch.Tensor]:
    """Return `STEPS` batches of the sources of Python's standard library."""
    tokens = tokenise(read_text(), VOCABULARY, tmp_path_factory.mktemp("text"))
    stream = batches(tokens.path, ROWS, LENGTH, 0)
    return [next(stream).cuda() for _ in range(STEPS)]


def _curve(
    model_type: str, text: list[torch.Tensor], order: list[int], parts: int = 1, patched: bool = False
) -> torch.Tensor:
    """Return the loss of each step. The rows of a batch have the given order and are split into `parts` parts."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if patched:
        assert {entry.part for entry in tigon.patch(model).replaced} == PARTS
    losses = []
    for i, ids in enumerate(text):
        optimizer.param_groups[0]["lr"] = 3e-4 * min(1.0, (i + 1) / 10)
        loss = torch.zeros((), device="cuda")
        for part in ids[order].chunk(parts):
            partial = model(input_ids=part, labels=part, use_cache=False).loss / parts
            partial.backward()
            loss += partial.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"])
def test_a_patched_model_trains_as_stock(model_type, text):
    rows = list(range(ROWS))
    stock = _curve(model_type, text, rows)
    # These runs sum over rows in another order, and have products of other sizes, which cuBLAS sums in another order.
    others = [_curve(model_type, text, rows[::-1]), _curve(model_type, text, rows[3:] + rows[:3], parts=2)]
    patched_losses = _curve(model_type, text, rows, patched=True)
    noise = torch.stack([(other - stock).abs() for other in others])
    distance = (patched_losses - stock).abs()
    print(f"{model_type}: {stock[0]:.3f} -> {stock[-1]:.3f}, distance {distance.max():.1e}, noise {noise.max():.1e}")
    # The model learns.
    assert stock[-1] < stock[0] - 1.0
    # The noise of one step is random, so the sizes over the whole run are compared. Another order of the rows does not
    # change the forward of a row, but the patch rounds every layer differently. The factor is therefore three.
    assert distance.square().mean().sqrt() <= 3.0 * noise.square().mean().sqrt() + 1e-4
    assert distance.max() <= 3.0 * noise.max()
