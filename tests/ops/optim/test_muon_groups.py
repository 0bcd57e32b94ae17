"""tigon.muon_groups divides the parameters of a model, and tigon.Muon refuses other options and groups."""

import pytest
import torch
from torch import nn

import tigon


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.convolution = nn.Conv1d(8, 8, 2)
        self.mlp = nn.Linear(8, 12)
        self.experts = nn.Parameter(torch.randn(2, 12, 8))
        self.experts_bias = nn.Parameter(torch.randn(2, 12))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.positions = nn.Parameter(torch.randn(1, 4, 8))
        self.head = nn.Linear(8, 10)


def names_of(model: nn.Module, group: dict) -> set[str]:
    return {name for name, p in model.named_parameters() if any(p is x for x in group["params"])}


def test_groups_of_a_model():
    model = TinyModel()
    muon, decayed, vectors = tigon.muon_groups(model, exclude=[model.head], betas=(0.8, 0.9))
    assert names_of(model, muon) == {"mlp.weight", "experts"}
    assert names_of(model, decayed) == {"embed.weight", "convolution.weight", "positions", "head.weight"}
    assert names_of(model, vectors) == {"convolution.bias", "mlp.bias", "head.bias", "experts_bias"}
    assert (muon["use_muon"], decayed["betas"], vectors["weight_decay"]) == (True, (0.8, 0.9), 0.0)
    assert "weight_decay" not in decayed
    # Parameters may be excluded by themselves.
    assert "mlp.weight" in names_of(model, tigon.muon_groups(model, exclude=[model.mlp.weight])[1])


@pytest.mark.no_interpreter("The groups do not depend on kernels.")
def test_groups_of_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_labels=3)
    for kind, head in (
        (transformers.LlamaForCausalLM, "lm_head.weight"),
        (transformers.LlamaForSequenceClassification, "score.weight"),
    ):
        model = kind(config)
        muon, decayed, vectors = tigon.muon_groups(model)
        assert names_of(model, decayed) == {"model.embed_tokens.weight", head}
        assert len(muon["params"]) == 7
        assert all(".norm" in name or "norm." in name for name in names_of(model, vectors))


TORCH = (3.4445, -4.7750, 2.0315)
MATRIX = nn.Parameter(torch.zeros(4, 6))
VECTOR = nn.Parameter(torch.zeros(3))
REFUSALS = {
    "a vector": (
        lambda: tigon.Muon([VECTOR]),
        "Muon: a parameter must have 2 dimensions, or 3 if it stacks matrices, got shape (3,); a group with "
        "use_muon=False takes it (tigon.muon_groups makes the groups of a model)",
    ),
    "a step too many": (lambda: tigon.Muon([MATRIX], ns_steps=100), "Muon: ns_steps must be in [0, 99], got 100"),
    "coefficients of other steps": (
        lambda: tigon.Muon([MATRIX], ns_coefficients=[TORCH, TORCH]),
        f"Muon: ns_coefficients must be three numbers, or three numbers for each step, got {[TORCH, TORCH]}",
    ),
    "a negative rate": (lambda: tigon.Muon([MATRIX], lr=-1.0), "Muon: lr must not be negative, got -1.0"),
    "momentum above one": (lambda: tigon.Muon([MATRIX], momentum=1.5), "Muon: momentum must be in [0, 1], got 1.5"),
    "an option of a group": (
        lambda: tigon.Muon([{"params": [MATRIX], "momentum": "high"}]), "Muon: momentum must be a number, got 'high'",
    ),
    "a string for use_muon": (
        lambda: tigon.Muon([{"params": [VECTOR], "use_muon": "no"}]), "Muon: use_muon must be a bool, got 'no'",
    ),
    "betas of a group of AdamW": (
        lambda: tigon.Muon([{"params": [VECTOR], "use_muon": False, "betas": 3}]),
        "Muon: betas must be two numbers, got 3 in a group with use_muon=False",
    ),
    "compact states": (
        lambda: tigon.Muon([{"params": [VECTOR], "use_muon": False, "state": "8bit"}]),
        "Muon: a group with use_muon=False cannot have state, got '8bit'",
    ),
    "no parameters": (lambda: tigon.Muon([]), "Muon: optimizer got an empty parameter list"),
    "exclude a name": (
        lambda: tigon.muon_groups(TinyModel(), exclude=["head"]),
        "muon_groups: exclude must have modules and parameters, got 'head'",
    ),
    "no model": (lambda: tigon.muon_groups([VECTOR]), "muon_groups: model must be a Module, got list"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, message):
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value) == message
