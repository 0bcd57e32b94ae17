"""A module that is not a pure function of its input and weights is called once, at every level of memory."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

import tigon
from op_cases import one_in

transformers = pytest.importorskip("transformers")

CALLS: list[int] = []
COUNT = 0


class Noisy(nn.Module):
    """A projection that adds a value to its output. The value differs in every call."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.steps = layer, 0
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.generator, self.numbers = torch.Generator().manual_seed(0), itertools.count()

    def forward(self, x):
        return self.layer(x) + 0.1 * self.noise()

    def noise(self):
        raise NotImplementedError


def noise_from_a_generator(self):
    return torch.rand(1, generator=self.generator)


def noise_from_numpy(self):
    return float(np.random.rand())


def noise_from_python(self):
    return random.random()


def noise_from_a_counter(self):
    self.steps += 1
    return self.steps


def noise_from_an_iterator(self):
    return next(self.numbers)


def noise_from_a_list(self):
    CALLS.append(1)
    return len(CALLS)


def noise_from_a_global(self):
    global COUNT
    COUNT += 1
    return COUNT


NOISES = [
    noise_from_a_generator, noise_from_numpy, noise_from_python, noise_from_a_counter, noise_from_an_iterator,
    noise_from_a_list, noise_from_a_global,
]  # fmt: skip


def step(memory: str | None, noise) -> tuple[torch.Tensor, torch.Tensor]:
    global COUNT
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0), np.random.seed(0), random.seed(0), CALLS.clear()
    COUNT = 0
    model = transformers.LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.mlp.gate_proj = type("Noisy", (Noisy,), {"noise": noise})(layer.mlp.gate_proj)
    if memory:
        tigon.patch(model, memory=memory)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    ids = torch.arange(24).view(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), model.model.layers[0].mlp.down_proj.weight.grad


@one_in(6, noise={noise.__name__: noise for noise in NOISES}, memory=["default", "lean", "lean+mlp", "checkpoint"])
def test_a_projection_that_differs_in_every_call_is_called_once(noise, memory):
    loss, gradient = step(memory, noise)
    expected, stock = step(None, noise)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, stock, rtol=1e-4, atol=1e-6)
