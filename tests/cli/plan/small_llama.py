"""The small Llama whose steps the tests of `tigon plan` count."""

import contextlib

import torch
import transformers

import tigon
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
    return on_meta(transformers.LlamaConfig(**SIZES | sizes), dtype)


def on_meta(config, dtype):
    """Return the model of a config on meta in a dtype and in training mode."""
    model, _ = build(config, attention=None)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.train()


def saved_bytes_of(model, tokens, **options) -> int:
    """Return the bytes that a real step saves for backward, without parameters."""
    parameters, saved_tensors = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def pack(x):
        if x.untyped_storage()._cdata not in parameters:
            saved_tensors[x.untyped_storage()._cdata] = x
        return x

    patched = tigon.patched(model, **options) if options else contextlib.nullcontext()
    with patched, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=tokens, labels=tokens)
    return sum(x.untyped_storage().nbytes() for x in saved_tensors.values())
