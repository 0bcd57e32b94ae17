"""Norms find the maxima of what FP8 ops quantise: the same bits as without them, by fewer passes."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon
from fp8_passes import FIND_MAXIMA, record_passes
from op_cases import DEVICE
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_reference, quantise_tensor
from tigon.ops.norms.rms_norm import add_rms_norm_for, rms_norm_for
from tigon.runtime.maxima import MaximaNeeds, MaximaRequest, MaximaRequests, attach, zero_maxima

pytestmark = pytest.mark.kernels

recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOKENS, HIDDEN, INNER = 7, 32, 64


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, ...]]:
    """Return a list to which each pass that finds the maxima of a matrix adds its shape."""
    return record_passes(monkeypatch, FIND_MAXIMA)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, DTYPE)


def _leaves() -> list[Tensor]:
    """Return x, a residual, the weights of two norms, and weights of q, gate, up and down."""
    shapes = (1, TOKENS, HIDDEN), (1, TOKENS, HIDDEN), (HIDDEN,), (HIDDEN,), (HIDDEN, HIDDEN)
    shapes += (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    return [_randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


class Layer:
    """A decoder layer without attention: a norm and a projection, the norm of a sum and an MLP."""

    def __init__(self, recipe: str, learns: bool = True, fp8_dw: bool = True, between: Callable | None = None) -> None:
        self.options = {"recipe": recipe, "fp8_dw": fp8_dw}
        self.requests = [MaximaRequests() if learns else None for _ in range(3)]
        # This function is called with the result of each norm.
        self.between = between or (lambda y: y)

    def __call__(self, x, residual, weight, other_weight, q, gate, up, down) -> Tensor:
        options = {"offset": 0.0, "rounding": "before_weight"}
        y, x = rms_norm_for(self.requests[0], x, weight, 1e-6, **options, returns_x=True)
        (attention,) = fp8_projections(self.between(y), [q], [None], **self.options)
        y, total = add_rms_norm_for(self.requests[1], attention, residual + x, other_weight, 1e-6, **options)
        total = total + fp8_glu_mlp(self.between(y), gate, up, down, **self.options)
        return rms_norm_for(self.requests[2], total, weight, 1e-6, **options)


def _step(layer: Callable, leaves: list[Tensor]) -> list[Tensor]:
    y = layer(*leaves)
    return [y, *torch.autograd.grad(y, leaves, _randn(*y.shape, seed=7))]


def _assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


BLOCKS = {"default": nullcontext, "lean": tigon.lean, "lean mlp": lambda: tigon.lean(mlp=True)}
# The passes over x of the projection and of the MLP, and over the gradients of both.
OVER_X = {"default": 4, "lean": 6, "lean mlp": 7}


@pytest.mark.parametrize("level", BLOCKS)
@recipes
def test_steps_have_the_same_bits_and_fewer_passes(recipe, level, passes):
    leaves, layer = _leaves(), Layer(recipe)

    def run(layer: Layer) -> tuple[list[Tensor], int]:
        passes.clear()

        def call(*tensors):
            with BLOCKS[level]():
                return layer(*tensors)

        results = _step(call, leaves)
        return results, sum(shape == (TOKENS, HIDDEN) for shape in passes)

    expected, count = run(Layer(recipe, learns=False))
    # With scales of rows, the copy by rows takes one pass in any case.
    assert count == (OVER_X[level] if recipe == "tensorwise" else 4)
    for expected_count in (count, 0, 0):
        actual, count = run(layer)
        _assert_equal(actual, expected)
        assert count == expected_count


@recipes
def test_a_checkpoint_has_the_same_bits(recipe, passes):
    leaves, layer = _leaves(), Layer(recipe)
    expected = _step(Layer(recipe, learns=False), leaves)
    for _ in range(3):
        passes.clear()
        _assert_equal(_step(lambda *t: checkpoint(layer, *t, use_reentrant=False), leaves), expected)
    assert (TOKENS, HIDDEN) not in passes


BETWEEN = {
    "a write in place": lambda y: y.mul_(3) if not y.requires_grad else y.detach().mul_(3),
    "a scaled copy": lambda y: y * 3,
    "a part": lambda y: y[..., :TOKENS, :] * 1,
    "a flat view": lambda y: y.view(-1, HIDDEN).view(1, -1, HIDDEN),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@recipes
def test_code_between_the_norm_and_its_reader_changes_no_bits(recipe, between):
    with torch.no_grad():
        leaves, layer = _leaves(), Layer(recipe, between=between)
        expected = Layer(recipe, learns=False, between=between)(*leaves)
        for _ in range(3):
            torch.testing.assert_close(layer(*leaves), expected, rtol=0, atol=0)


@recipes
def test_a_gradient_that_a_hook_changes_in_place_is_read_again(recipe):
    """The hook runs between the norm that writes the gradient of its input and the MLP or the projection before it."""

    class Hooked(Layer):
        def __call__(self, x, *rest):
            hook = lambda dy: dy.mul_(3)
            x = x * 1
            x.register_hook(hook)
            (y,) = fp8_projections(x, rest[3:4], [None], **self.options)
            y.register_hook(hook)
            return super().__call__(y, *rest)

    leaves, layer = _leaves(), Hooked(recipe)
    expected = _step(Hooked(recipe, learns=False), leaves)
    for _ in range(3):
        _assert_equal(_step(layer, leaves), expected)
    assert any(layer.requests[0].gradient.needs)


@pytest.mark.parametrize(("recipe", "fp8_dw"), [("tensorwise", False), ("rowwise", True)])
def test_options_and_frozen_weights_have_the_same_bits(recipe, fp8_dw):
    leaves = _leaves()
    for frozen in (leaves[4:], leaves[2:4]):
        for x in frozen:
            x.requires_grad_(False)
        needed = [x for x in leaves if x.requires_grad]
        results = []
        for layer in (Layer(recipe, False, fp8_dw), Layer(recipe, True, fp8_dw)):
            for _ in range(2):
                y = layer(*leaves)
                results.append([y, *torch.autograd.grad(y, needed, _randn(*y.shape, seed=7))])
        for other in results[1:]:
            _assert_equal(other, results[0])


def test_a_norm_whose_readers_quantise_nothing_does_no_more_work():
    x, requests = _leaves()[0], MaximaRequests()
    for _ in range(3):
        y = rms_norm_for(requests, x, None, 1e-6, offset=0.0, rounding="before_weight")
        y.sum().backward()
        assert not any(requests.result.needs)
        assert not any(requests.gradient.needs)


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("is_rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_known_maxima_give_the_copies_of_the_reference(is_rowwise, copies, passes):
    x = _randn(37, 48)
    layout = Layout(torch.float8_e4m3fn, is_rowwise, *copies)
    maxima, request = zero_maxima(x, 37, 48, MaximaNeeds(True, True, True)), MaximaRequest()
    for m, value in zip(maxima, (x.abs().amax().view(1), x.abs().amax(1), x.abs().amax(0)), strict=True):
        m.copy_(value.float().view(torch.int32))
    attach(x, maxima, request)
    actual, expected = quantise_tensor(x, layout), quantise_reference(x, layout)
    assert not passes
    for factor, values in ((actual.rows, expected.rows), (actual.transposed, expected.transposed)):
        assert (factor is None) == (values is None)
        assert factor is None or torch.equal(factor.values.view(torch.uint8), values.view(torch.uint8))
    assert request.needs == layout.maxima_of_first_pass
    # Maxima of an older version are not used.
    x.mul_(2)
    actual, expected = quantise_tensor(x, layout), quantise([x], layout)
    for factor, other in zip(actual, expected, strict=True):
        assert factor is None or torch.equal(factor.scale, other.scale)
