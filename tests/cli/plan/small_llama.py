"""The small Llama whose steps the tests of `tigon plan` count."""

import torch
import transformers

from tigon.cli.inspect.build import build
from tigon.cli.plan.engines import optimizer_costs

# The proportions of Llama-3-8B.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "use_cache": False,
}
NO_OPTIMIZER = optimizer_costs("none", [], torch.bfloat16)


def build_llama(dtype=torch.bfloat16, **sizes):
    """Return a model on meta in a dtype and in training mode. `sizes` replace those of `SIZES`."""
    model, _ = build(transformers.LlamaConfig(**SIZES | sizes), attention=None)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.train()
