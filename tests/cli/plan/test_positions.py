"""`tigon plan` refuses sequences that are longer than the table of positions of a model."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")


from cli.plan.small_llama import build_llama  # noqa: E402
from tigon.cli.inspect.build import build  # noqa: E402
from tigon.cli.plan.planner import PlanSettings, TooLong, plan  # noqa: E402
from tigon.cli.plan.positions import find_position_table  # noqa: E402

SMALL = {"vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
BOUNDED = {
    "a table": (transformers.GPT2Config(**SMALL, n_positions=64), 64, "transformer.wpe"),
    "a table with rows before the first position": (
        transformers.OPTConfig(**SMALL, max_position_embeddings=64, ffn_dim=32, word_embed_proj_dim=32),
        64,
        "model.decoder.embed_positions",
    ),
    "a table that begins with the padding": (
        transformers.RobertaConfig(**SMALL, max_position_embeddings=66, is_decoder=True, pad_token_id=1),
        64,
        "roberta.embeddings.position_embeddings",
    ),
    "sinusoids in a buffer": (
        transformers.GPTJConfig(**SMALL, n_positions=64, rotary_dim=8),
        64,
        "transformer.h.0.attn.embed_positions",
    ),
    "a sum with all rows": (transformers.OpenAIGPTConfig(**SMALL, n_positions=64), 64, "the config"),
    "a mask": (
        transformers.MptConfig(vocab_size=100, d_model=32, n_heads=2, n_layers=1, max_seq_len=64),
        64,
        "the con",
    ),
}
UNBOUNDED = {
    "rotary": transformers.LlamaConfig(**SMALL, max_position_embeddings=64, intermediate_size=32),
    "sinusoids that grow": transformers.XGLMConfig(
        vocab_size=100, num_layers=1, attention_heads=2, d_model=32, ffn_dim=32, max_position_embeddings=64
    ),
    "alibi": transformers.BloomConfig(vocab_size=100, n_layer=1, n_head=2, hidden_size=32),
    "relative": transformers.T5Config(vocab_size=100, num_layers=1, num_heads=2, d_model=32, d_ff=32),
}


@pytest.mark.parametrize(("config", "positions", "name"), BOUNDED.values(), ids=BOUNDED)
def test_a_sequence_beyond_the_positions_is_refused(config, positions, name):
    """On meta no index is out of range, but a GPU raises an IndexError, or the shapes of the model do not fit."""
    model, _ = build(config, attention=None)
    model.config.use_cache = False
    assert find_position_table(model, positions) is None
    for seq in (positions + 1, 4 * positions):
        table = find_position_table(model, seq)
        assert table.positions == positions
        assert table.name.startswith(name)
        with pytest.raises(
            TooLong, match=rf"must be at most {positions} \({name}.* has no more positions\), got {seq}"
        ):
            next(plan(config, PlanSettings(seq, dtype="fp32"), levels=("stock",), search=False))
    level_plan = next(
        plan(config, PlanSettings(32, dtype="fp32"), levels=("stock",), lengths=(32, 64, 128, 256), search=False)
    )
    assert [step.seq for step in level_plan.by_length] == [32, 64]


@pytest.mark.parametrize("config", UNBOUNDED.values(), ids=UNBOUNDED)
def test_computed_positions_have_no_limit(config):
    model, _ = build(config, attention=None)
    assert find_position_table(model, 256) is None


def test_a_table_that_no_token_reads_is_no_limit():
    """The model has an embedding of another kind, with as many rows as there are positions."""
    model = build_llama(max_position_embeddings=64)
    model.model.other_words = torch.nn.Embedding(64, 8, device="meta")
    assert find_position_table(model, 128) is None
