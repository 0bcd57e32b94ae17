"""The check of fp32 training curves passes correct runs and fails on small errors. tests/gpu runs it on kernels."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.curves import Choices, compare, first_flip, perturb, train  # noqa: E402
from hf.same_step import make_batch  # noqa: E402
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402

# An error of a gradient is visible in the first step. The test on a GPU takes all 32.
STEPS = 3
ERROR = 1e-4


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.sampled(2)
def test_a_patched_model_passes(model_type):
    comparison = compare(tiny_model(model_type), tigon.patch, make_batch(VOCABULARY), STEPS)
    assert comparison.failures() == []
    assert comparison.steps == STEPS
    assert comparison.last_loss < comparison.first_loss


def test_another_run_that_is_moved_by_one_unit_passes():
    comparison = compare(tiny_model("mixtral"), lambda model: perturb(model, 77), make_batch(VOCABULARY), STEPS)
    assert comparison.failures() == []
    assert max(comparison.loss_moved) > 0


def scale_weight_gradient(model: nn.Module) -> None:
    """Scale the gradient of one norm's weight, which changes nothing else: AdamW divides it by its size."""
    model.model.layers[0].input_layernorm.weight.register_hook(lambda g: g * (1 + ERROR))


def turn_weight_gradient(model: nn.Module) -> None:
    """Add noise of a relative size of ERROR to the gradient of one projection, which leaves its norm as it is."""

    def add_noise(g: Tensor) -> Tensor:
        noise = torch.randn(g.shape, generator=torch.Generator().manual_seed(3))
        return g + ERROR * g.norm() * noise / noise.norm()

    model.model.layers[1].self_attn.q_proj.weight.register_hook(add_noise)


def scale_input_gradient(model: nn.Module) -> None:
    """Scale the gradient that the last MLP returns for its input."""
    model.model.layers[-1].mlp.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * (1 + ERROR),))


def scale_output(model: nn.Module) -> None:
    """Scale the output of one norm."""
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda module, args, y: y * (1 + ERROR))


FAULTS = [scale_weight_gradient, turn_weight_gradient, scale_input_gradient, scale_output]


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sampled(3)
def test_a_relative_error_of_1e_4_fails(fault: Callable, model_type: str):
    comparison = compare(tiny_model(model_type), fault, make_batch(VOCABULARY), STEPS)
    assert any("gradient" in sentence for sentence in comparison.failures())


def test_the_loss_alone_does_not_show_a_scaled_gradient():
    """Curves therefore contain the gradients too."""

    def scale(model: nn.Module) -> None:
        model.model.layers[0].mlp.gate_proj.weight.register_hook(lambda g: g * 1.01)

    comparison = compare(tiny_model("llama"), scale, make_batch(VOCABULARY), STEPS)
    assert comparison.loss_share <= 1
    assert comparison.gradient_shares["model.layers.0.mlp.gate_proj.weight"] > 100


def test_a_gradient_that_is_lost_or_not_finite_fails():
    for factor in (0.0, float("nan")):

        def spoil(model: nn.Module, factor: float = factor) -> None:
            model.model.norm.weight.register_hook(lambda g: g * factor)

        comparison = compare(tiny_model("llama"), spoil, make_batch(VOCABULARY), 2, seeds=2)
        assert any("model.norm.weight" in sentence for sentence in comparison.failures())


class Mixture(nn.Module):
    """A choice of one of three experts per token, whose first two scores lie `gap` apart for every token."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 8, generator=generator))
        self.router = nn.Parameter(torch.randn(8, generator=generator))
        self.bias = nn.Parameter(torch.tensor([1.0, 1.0 - gap, -5.0]))

    def forward(self, x: Tensor) -> SimpleNamespace:
        scores = (x @ self.router)[:, None] + self.bias  # [tokens, 3]
        weight, index = scores.topk(1)
        return SimpleNamespace(loss=(weight * (x * self.experts[index[:, 0]])).square().mean())


def test_a_flip_at_a_near_tie_ends_the_comparison_and_passes():
    batch = {"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(1))}
    comparison = compare(Mixture(2e-7), lambda model: perturb(model, 77), batch)
    assert comparison.steps < 32
    assert comparison.flip is not None
    assert comparison.flip.gap < 1e-6
    assert comparison.failures() == []


def test_a_flip_that_is_no_near_tie_fails():
    def favour_second(model: nn.Module) -> None:
        with torch.no_grad():
            model.bias[1] += 2e-2

    batch = {"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(1))}
    comparison = compare(Mixture(1e-2), favour_second, batch)
    assert comparison.flip.step == 0
    assert comparison.flip.gap == pytest.approx(1e-2, rel=1e-3)
    (sentence,) = comparison.failures()
    assert "differs from stock's" in sentence


def test_the_choices_of_topk_and_argmax_are_recorded():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.3]])
    with Choices() as choices:
        scores.topk(2)
        torch.topk(input=scores, k=1, dim=0)
        scores.argmax(-1)
        torch.argmax(scores, dim=1, keepdim=True)
        # The argmax of all elements chooses nothing for a token, and the top 3 of three elements choose everything.
        torch.argmax(scores)
        scores.topk(3)
        scores.long().argmax(-1)
    assert [p.tolist() for p in choices.positions] == [[[1, 2], [0, 2]], [[1], [0], [0]], [[1], [0]], [[1], [0]]]
    assert [tuple(s.shape) for s in choices.scores] == [(2, 3), (3, 2), (2, 3), (2, 3)]


def test_an_exact_tie_is_no_flip():
    """Masked scores are equal, so it does not matter which of them is chosen."""
    batch = {"x": torch.ones(4, 8)}
    runs = [train(Mixture(0.0), batch, 1) for _ in range(2)]
    runs[0].choices.positions[0] = 1 - runs[0].choices.positions[0]
    assert first_flip(*runs) is None
