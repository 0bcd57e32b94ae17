"""Tiny models that train with and without graphs, and the comparison of both."""

import copy

import peft
import torch
import transformers
from torch import nn

import tigon
from tigon.graphs.forward import EAGER_USES

VOCABULARY = 37
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
# One of the lengths that calls are padded to.
LENGTH = 64


def llama(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options)).train()


def qwen3_moe():
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **experts)).train()


def lora(dropout=0.0, model=None):
    model = llama() if model is None else model
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, lora_dropout=dropout
    )
    return peft.get_peft_model(model, config).train()


def batch(seed=0, length=LENGTH):
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(model, count=3, **arguments):
    """Return the losses and the gradients of some steps."""
    results = []
    for seed in range(count):
        loss = model(**batch(seed), **arguments)[0]
        loss.backward()
        results += [loss.detach().clone(), *gradients(model)]
        model.zero_grad()
    return results


class TwoBiases(nn.Module):
    """Both biases have the same gradient."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(4), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.norm(x) + (self.a + self.b)


def train_module(model):
    results = []
    for seed in range(5):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        results += [*gradients(model), *[x.clone() for x in model.buffers()]]
        model.zero_grad()
    return results


def flatten(results):
    return [x for each in results for x in (flatten(each) if isinstance(each, (list, tuple)) else [each])]


def run_both(script, model=None, *, is_warm=True, **options):
    """Run a script on an eager model and on one with graphs, check that results are equal, and return the record.

    Before, both models train until the first signature is captured at its next use.
    """
    eager = llama() if model is None else model
    graphed = copy.deepcopy(eager)
    results = []
    for each in (eager, graphed):
        report = tigon.patch(each, graphs=each is graphed, **options)
        if is_warm:
            train(each, EAGER_USES)
        torch.manual_seed(5)
        results.append(flatten(script(each)))
    expected, ours = results
    assert len(expected) == len(ours)
    for i, (x, y) in enumerate(zip(expected, ours, strict=True)):
        same = torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y or x == y
        assert same, i
    return report.graphs
