"""Experts in FP8: agreement with eager code, the bound of their errors, absent experts, and what they save."""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8_eager
import tigon
from fp8_cases import same_node
from op_cases import DEVICE, one_in, saved_tensors
from tigon.ops.experts import fp8_products
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.choice_order import route
from tigon.ops.experts.fp8_rows import quantise_and_spread, quantise_and_spread_reference
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8, moe_mlp_reference
from tigon.ops.fp8.quantisation import Layout, quantise
from tigon.ops.fp8.quantisation_kernels import Fp8RowConfig
from tigon.ops.fp8.stacks import quantise_stack, quantise_stack_reference
from tigon.ops.fp8.weights import WeightCache
from tigon.runtime.tuning import tuned

# torch has no grouped products in FP8 for other chips, so a GPU of another kind emulates them like a CPU.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
T, K, E, H, INNER = 21, 2, 5, 32, 48


def _normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def _index(tokens: int = T, choices: int = K, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)]).to(DEVICE)


def _leaves(
    tokens: int = T, biases: bool = False, transposed: bool = False, activation: object = "silu", **_: object
) -> dict:
    width = INNER if activation == "relu2" else 2 * INNER
    shapes = {"up": (E, width, H), "down": (E, H, INNER)}
    shapes = {name: (s[0], s[2], s[1]) if transposed else s for name, s in shapes.items()}
    tensors = {name: _normal(*s, seed=i, scale=0.2) for i, (name, s) in enumerate(shapes.items())}
    tensors |= {"x": _normal(tokens, H), "weights": _normal(tokens, K).sigmoid()}
    if biases:
        tensors |= {"up_bias": _normal(E, width), "down_bias": _normal(E, H)}
    return {name: x.requires_grad_() for name, x in tensors.items()}


def _run(leaves: dict, index: Tensor, cache: WeightCache | None = None, **options) -> Tensor:
    parameters = ExpertParameters(*(leaves.get(name) for name in ("up", "down", "up_bias", "down_bias")))
    return moe_mlp_in_fp8(leaves["x"], parameters, index, leaves["weights"], cache=cache, **options)


def _positional(function):
    """Return a function with the signature of `_run` for one with the signature of `moe_mlp`."""

    def run(leaves: dict, index: Tensor, **options) -> Tensor:
        biases = {name: leaves[name] for name in ("up_bias", "down_bias") if name in leaves}
        return function(leaves["x"], leaves["up"], leaves["down"], index, leaves["weights"], **biases, **options)

    return run


def _step(run, leaves: dict, index: Tensor, **options) -> dict[str, Tensor]:
    """Return y and the gradients of the leaves that need one."""
    y = run(leaves, index, **options)
    needed = {name: x for name, x in leaves.items() if x.requires_grad}
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return {"y": y} | dict(zip(needed, torch.autograd.grad(y, list(needed.values()), upstream), strict=True))


def _errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    difference = lambda a, b: ((a.double() - b.double()).norm() / b.double().norm()).item()
    return {name: difference(actual[name], value) for name, value in expected.items()}


def _wide(leaves: dict) -> dict:
    return {name: x.detach().double().requires_grad_() for name, x in leaves.items()}


def _gate(h: Tensor) -> Tensor:
    """Compute a clamped gate like that of GPT-OSS, whose gate and up alternate."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


LAYOUTS = {
    "plain": {}, "transposed, biases": {"transposed": True, "biases": True},
    "gelu": {"activation": "gelu", "biases": True},
    "gelu_tanh, transposed": {"activation": "gelu_tanh", "transposed": True}, "no gate": {"activation": "relu2"},
    "a function, transposed, biases": {"activation": _gate, "transposed": True, "biases": True},
    "a function": {"activation": _gate},
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
# A function of the user takes another path than an activation with a name.
both_paths = pytest.mark.parametrize(
    "layout", [LAYOUTS["transposed, biases"], LAYOUTS["a function"]], ids=["", "function"]
)


def _options(layout: dict) -> dict:
    return {name: value for name, value in layout.items() if name != "biases"}


@every_layout
@pytest.mark.sampled(in_interpreter=5)
def test_it_is_as_accurate_as_eager_code(layout):
    leaves, index, options = _leaves(**layout), _index(), _options(layout)
    exact = _step(_positional(moe_mlp_reference), _wide(leaves), index, **options)
    actual = _step(_run, leaves, index, **options)
    errors = _errors(actual, exact)
    # A chain of three products errs by about three times the 3.7 % of one product.
    assert max(errors.values()) < 0.13
    # The bias of the last product is added after it.
    assert "down_bias" not in errors or errors["down_bias"] < 2**-7
    if not callable(layout.get("activation")):
        eager = _step(_positional(fp8_eager.experts), leaves, index, **options)
        for name, error in _errors(eager, exact).items():
            assert errors[name] < 1.3 * error + 2**-7, name
        # Both round the same values, except for the gradient of the router's weights: that of eager code is the product
        # of dy with the rounded result of the second product.
        agreement = _errors(actual, eager)
        assert agreement.pop("weights") < 0.1
        assert max(agreement.values()) < (0.02 if DTYPE is torch.float32 else 0.1)


@same_node
@every_layout
def test_the_products_of_forward_and_of_dx_are_in_fp8_and_those_of_dw_are_not(layout, monkeypatch):
    """dD = sum dy^T (w a) is exact up to the error of `a`, which comes from the first product."""
    counts = []
    multiply = fp8_products.multiply_groups
    monkeypatch.setattr(fp8_products, "multiply_groups", lambda *args: counts.append(args[3]) or multiply(*args))
    leaves, index = _leaves(**layout), _index()
    _step(_run, leaves, index, **_options(layout))
    assert counts == [DTYPE] * 4
    # Values that e4m3 holds exactly are not rounded: then everything is as accurate as in the dtype of the weights.
    signs = lambda x, scale=1.0: (x.detach().sign() * scale).requires_grad_()
    leaves |= {"x": signs(leaves["x"]), "up": signs(leaves["up"], 0.25)}
    exact = _step(_positional(moe_mlp_reference), _wide(leaves), index, **_options(layout))
    errors = _errors(_step(_run, leaves, index, **_options(layout)), exact)
    assert errors["down"] < (1e-5 if DTYPE is torch.float32 else 0.01)


ABSENT = {"E": E, "more": E + 7, "negative": -1, "most": 2**40}


@one_in(8, layout=LAYOUTS, absent=ABSENT)
@pytest.mark.sampled(in_interpreter=3)
def test_experts_of_other_ranks_add_nothing(layout, absent):
    """Nothing writes their rows, so the values in that memory must not change results or gradients."""
    leaves, options = _leaves(**layout), _options(layout)
    index = _index()
    index[1::2, 1], index[4] = absent, absent
    exact = _step(_positional(moe_mlp_reference), _wide(leaves), index, **options)
    actual = _step(_run, leaves, index, **options)
    assert max(_errors(actual, exact).values()) < 0.13
    assert (actual["y"][4] == 0).all()
    assert (actual["weights"][4] == 0).all()


INDICES = {
    "all to one expert": lambda: torch.full((T, K), 2, device=DEVICE), "one token": lambda: _index(1),
    "int32": lambda: _index().int(),
}  # fmt: skip


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.sampled(in_interpreter=2)
def test_experts_without_rows(index):
    index = index()
    leaves = _leaves(len(index), biases=True)
    actual = _step(_run, leaves, index)
    errors = _errors(actual, _step(_positional(moe_mlp_reference), _wide(leaves), index))
    # The gradient of the router's weights has two numbers for one token, and the terms of a dot product may cancel.
    assert errors.pop("weights") < 0.26
    assert max(errors.values()) < 0.13
    unused = [e for e in range(E) if not (index == e).any()]
    assert (actual["up"][unused] == 0).all()
    assert (actual["down"][unused] == 0).all()


@one_in(2, shape=[(3, 16, 48), (2, 144, 80), (1, 272, 16)], dtype={"bf16": torch.bfloat16, "fp32": torch.float32})
def test_copies_of_a_stack_are_those_of_its_matrices(shape, dtype):
    """In bf16, many quotients of a value and its scale lie between two FP8 numbers."""
    weight = _normal(*shape, dtype=dtype) * _normal(shape[0], 1, shape[2], seed=1, dtype=dtype).exp()
    weight[0, :, 3] = 0.0
    copies = quantise_stack(weight, True, True)
    for e, matrix in enumerate(weight):
        factors = quantise([matrix], Layout(True, True, True))
        for actual, factor, source in zip(copies, factors, (matrix, matrix.t()), strict=True):
            assert torch.equal(actual.values[e].view(torch.uint8), factor.values.view(torch.uint8))
            assert torch.equal(actual.scale[e], factor.scale.view(-1))
            values = actual.values[e].double() * actual.scale[e][:, None].double()
            torch.testing.assert_close(values, fp8_eager.rounded(source, "rowwise", 1), rtol=1e-6, atol=0)
    for actual, is_transposed in zip(copies, (False, True), strict=True):
        expected = quantise_stack_reference(weight, is_transposed)
        assert torch.equal(actual.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(actual.scale, expected.scale)
    assert quantise_stack(weight, True, False).transposed is None
    assert quantise_stack(weight.mT, False, True).transposed.values.shape == shape


@pytest.mark.parametrize("block", [None, 16], ids=["in one block", "in several blocks"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["tokens", "weighted tokens"])
def test_tokens_are_quantised_before_they_are_spread(is_weighted, block):
    index = _index()
    index[3, 0] = E
    routing, x = route(index, E), _normal(T, H)
    weights = _normal(T, K) if is_weighted else None
    expected = quantise_and_spread_reference(x, weights, routing)
    with tuned(Fp8RowConfig, **({"block": block} if block else {})):
        actual = quantise_and_spread(x, weights, routing)
    present = T * K - 1
    assert torch.equal(actual.values[:present].view(torch.uint8), expected.values[:present].view(torch.uint8))
    assert torch.equal(actual.scale[:present], expected.scale[:present])


def _saved_bytes(run, leaves: dict) -> int:
    saved = saved_tensors(lambda: run(leaves, _index()))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for start, size in storages.items() if start not in {t.data_ptr() for t in leaves.values()})


@same_node
def test_it_saves_what_experts_in_the_dtype_of_the_weights_save():
    leaves = _leaves()
    for options in (None, {}, {"mlp": True}):
        sizes = []
        for run in (_run, _positional(tigon.moe_mlp)):
            with tigon.lean(**options) if options is not None else torch.enable_grad():
                sizes.append(_saved_bytes(run, leaves))
        assert sizes[0] == sizes[1]


@same_node
@both_paths
@pytest.mark.parametrize("options", [{}, {"mlp": True}, None], ids=["lean", "lean mlp", "checkpoint"])
def test_recomputation_gives_the_same_bits(layout, options):
    leaves, index = _leaves(**layout), _index()
    run = functools.partial(_run, **_options(layout))
    expected = _step(run, leaves, index)

    def recomputing_run(leaves: dict, index: Tensor) -> Tensor:
        if options is None:
            return checkpoint(run, leaves, index, use_reentrant=False)
        with tigon.lean(**options):
            return run(leaves, index)

    for cache in (None, WeightCache()):
        run = functools.partial(_run, cache=cache, **_options(layout))
        for name, value in _step(recomputing_run, leaves, index).items():
            assert torch.equal(value, expected[name]), name
