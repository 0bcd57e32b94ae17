"""A gated MLP in FP8: agreement with eager code, what it saves, and its behaviour under lean and checkpoints."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8_eager
import tigon
from fp8_cases import DTYPE, MODES, RECIPES, modes, randn, recipes, same_node, step
from op_cases import one_in, saved_tensors
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.weights import WeightCache
from tigon.ops.mlps.glu_mlp import glu_mlp_reference

HIDDEN, INNER = 32, 64


def _leaves(*leading: int) -> list[Tensor]:
    """Return x, gate, up and down."""
    gate, up = (randn(INNER, HIDDEN, seed=seed) for seed in (1, 2))
    tensors = randn(*leading, HIDDEN), gate, up, randn(48, INNER, seed=3, scale=0.2)
    return [x.requires_grad_() for x in tensors]


def _relative_errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(actual, exact, strict=True)]


@one_in(1, kind=["silu", "gelu", "gelu_tanh"], leading=[(7,), (2, 17)], recipe=RECIPES, fp8_dw=MODES)
@pytest.mark.sampled(in_interpreter=5)
def test_it_is_as_accurate_as_eager_code(kind, leading, recipe, fp8_dw):
    """The two differ where an intermediate result lies between two FP8 values, so their errors are compared."""
    leaves = _leaves(*leading)
    exact = step(lambda *t: glu_mlp_reference(*t, kind), [x.detach().double().requires_grad_() for x in leaves])
    actual = step(lambda *t: fp8_glu_mlp(*t, activation=kind, recipe=recipe, fp8_dw=fp8_dw), leaves)
    eager = step(lambda *t: fp8_eager.glu_mlp(*t, kind, recipe, fp8_dw), leaves)
    assert [x.shape for x in actual] == [x.shape for x in exact]
    for error, eager_error in zip(_relative_errors(actual, exact), _relative_errors(eager, exact), strict=True):
        # A chain of three products errs by about three times the 3.7 % of one product.
        assert error < min(1.2 * eager_error, 0.13)
    # Both round the same values, so they agree much better than either agrees with the exact result.
    assert max(_relative_errors(actual, eager)) < (0.02 if DTYPE is torch.float32 else 0.1)


def _shapes(tensors: list[Tensor]) -> list[tuple]:
    """Return the dtypes and shapes of gate, up and the FP8 copy of x among the saved tensors."""
    sizes = 16, HIDDEN
    activations = [t for t in tensors if t.dim() == 2 and t.shape[0] in sizes and not t.requires_grad]
    return sorted((str(t.dtype), tuple(t.shape)) for t in activations)


@modes
def test_it_saves_gate_up_and_one_copy_of_x(fp8_dw):
    leaves = _leaves(16)
    saved = saved_tensors(lambda: fp8_glu_mlp(*leaves, fp8_dw=fp8_dw))
    gates = [(str(DTYPE), (16, INNER))] * 2
    assert _shapes(saved) == sorted([*gates, ("torch.float8_e4m3fn", (HIDDEN, 16))] if fp8_dw else gates)
    assert any(t is leaves[0] for t in saved) == (not fp8_dw)
    for weight in leaves[1:]:
        weight.requires_grad_(False)
    assert _shapes(saved_tensors(lambda: fp8_glu_mlp(*leaves, fp8_dw=fp8_dw))) == gates


@same_node
@recipes
@modes
@pytest.mark.parametrize("options", [{}, {"mlp": True}], ids=["lean", "lean mlp"])
def test_lean_has_the_same_gradients_and_saves_the_input(recipe, fp8_dw, options):
    run = lambda *t: fp8_glu_mlp(*t, recipe=recipe, fp8_dw=fp8_dw)
    leaves = _leaves(7)
    expected = step(run, leaves)

    def lean_run(*tensors):
        with tigon.lean(**options):
            return run(*tensors)

    torch.testing.assert_close(step(lean_run, leaves), expected, rtol=0, atol=0)
    saved = saved_tensors(lambda: lean_run(*leaves))
    assert any(t is leaves[0] for t in saved)
    assert sum(t.shape == (7, INNER) for t in saved) == (0 if options else 2)


@same_node
@recipes
@modes
@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
def test_a_checkpoint_has_the_same_gradients_and_multiplies_gate_and_up_again(recipe, fp8_dw, cached, monkeypatch):
    from tigon.ops.fp8 import fp8_glu_mlp as module

    run = lambda *t: fp8_glu_mlp(*t, recipe=recipe, fp8_dw=fp8_dw, caches=WeightCache() if cached else None)
    leaves = _leaves(7)
    expected = step(run, leaves)
    products, multiply = [], module.multiply_fp8
    monkeypatch.setattr(module, "multiply_fp8", lambda *a, **k: products.append(a) or multiply(*a, **k))
    y = checkpoint(run, *leaves, use_reentrant=False)
    assert len(products) == 3
    gradients = torch.autograd.grad(y, leaves, randn(*y.shape, seed=7))
    torch.testing.assert_close([y, *gradients], expected, rtol=0, atol=0)
    # The second run repeats gate and up, but not y. Backward computes da and dx here, and dW in the other file.
    assert len(products) == 3 + 2 + 2
