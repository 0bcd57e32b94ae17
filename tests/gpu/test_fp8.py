"""Tests of FP8 ops that need a GPU: the units against the emulation, waits, CUDA graphs, large addresses, memory."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import tigon
from gpu.steps import capture, no_waits
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.choice_order import route
from tigon.ops.experts.fp8_rows import quantise_and_spread, quantise_and_spread_reference
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8
from tigon.ops.fp8.formats import Factor, has_units
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_linear_reference, fp8_projections
from tigon.ops.fp8.products import emulate_fp8, emulate_groups, has_grouped_units, multiply_fp8, multiply_groups
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_reference
from tigon.ops.fp8.stacks import quantise_stack
from tigon.ops.fp8.weights import WeightCache
from tigon.runtime.device import device_of

BF16 = torch.bfloat16
recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
modes = pytest.mark.parametrize("fp8_dw", [True, False], ids=["dW in FP8", "dW in bf16"])


@pytest.fixture(autouse=True)
def _needs_units():
    if not has_units(device_of(torch.empty(0, device="cuda")).arch):
        pytest.skip("the GPU has no FP8 units")


def _randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16) * scale


def _leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return _randn(*shape, scale=scale).requires_grad_()


def _relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("is_fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 7, 128, 1000])
@recipes
def test_the_units_compute_what_the_emulation_computes(recipe, m, out_dtype, is_fast):
    is_rowwise = recipe == "rowwise"
    a = quantise_reference(_randn(m, 4096), Layout(is_rowwise, True, False))
    b = quantise_reference(_randn(256, 4096, scale=1 / 64), Layout(is_rowwise, True, False))
    factors = Factor(*a[:2]), Factor(*b[:2])
    bias = torch.randn(256, device="cuda").to(out_dtype)
    y = multiply_fp8(*factors, out_dtype, bias, is_fast)
    exact = emulate_fp8(*factors, torch.float64, bias.double())
    assert y.dtype == out_dtype
    # Rounding to bf16 errs by 0.17 %, and sums of fewer bits by less than 1 % of the result.
    assert _relative_error(y, exact) < (0.01 if is_fast else 0.003)


@pytest.mark.parametrize("is_rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [(8192, 4096), (1000, 14336), (3, 16)], ids=str)
def test_kernels_write_the_bytes_of_the_reference(shape, is_rowwise):
    x = _randn(*shape) * torch.randn(shape[1], device="cuda").exp()
    for copies in ((True, True), (True, False), (False, True)):
        layout = Layout(is_rowwise, *copies)
        actual, expected = quantise([x], layout), quantise_reference(x, layout)
        for factor, values, scale in zip(actual, expected[::2], expected[1::2], strict=True):
            assert (factor is None) == (values is None)
            if factor is not None:
                assert torch.equal(factor.values.view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(factor.scale, scale)


@recipes
@modes
@pytest.mark.parametrize("tokens", [8192, 1001])
def test_a_layer_of_llama_is_as_accurate_as_the_emulation(recipe, fp8_dw, tokens):
    x, weight, dy = _leaf(tokens, 4096), _leaf(1024, 4096, scale=1 / 64), _randn(tokens, 1024)
    results = []
    for run in (tigon.fp8_linear, fp8_linear_reference):
        y = run(x, weight, recipe=recipe, fp8_dw=fp8_dw)
        results.append([y, *torch.autograd.grad(y, [x, weight], dy)])
    assert max(_relative_error(a, b) for a, b in zip(*results, strict=True)) < 0.01


def _mlp() -> list[Tensor]:
    return [
        _leaf(512, 256), _leaf(1024, 256, scale=1 / 16), _leaf(1024, 256, scale=1 / 16), _leaf(256, 1024, scale=1 / 32)
    ]  # fmt: skip


@recipes
@modes
def test_an_op_never_waits_for_the_device(recipe, fp8_dw):
    leaves, cache = _mlp(), WeightCache()

    def step() -> None:
        for caches in (cache, None):
            y = fp8_glu_mlp(*leaves, recipe=recipe, fp8_dw=fp8_dw, caches=caches)
            (z,) = fp8_projections(y, [leaves[1]], [None], recipe=recipe, fp8_dw=fp8_dw)
            torch.autograd.grad(z.sum(), leaves)

    # The first run compiles kernels and allocates workspaces.
    step()
    with no_waits():
        step()


def _replay_with_other_values(step: Callable[[], list[Tensor]], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Capture a step in a CUDA graph, change the leaves, and return the results of a replay."""
    graph, captured = capture(step)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(-1.5)
    graph.replay()
    torch.cuda.synchronize()
    # The memory of the captured results belongs to the graph, which ends here.
    return [result.clone() for result in captured]


@recipes
@modes
def test_a_replayed_graph_reads_the_weights_that_it_finds(recipe, fp8_dw):
    leaves, cache = _mlp(), WeightCache()

    def step() -> list[Tensor]:
        y = fp8_glu_mlp(*leaves, recipe=recipe, fp8_dw=fp8_dw, caches=cache)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    captured = _replay_with_other_values(step, leaves)
    torch.testing.assert_close(captured, step(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_matrices_of_more_than_2_31_values(is_rowwise):
    m, k = 2**18 + 3, 8192
    x = torch.zeros(m, k, device="cuda", dtype=BF16)
    x[-1, -1], x[0, 5] = 3.0, -1.0
    rows, transposed = quantise([x], Layout(is_rowwise, True, True))
    assert rows.values[-1, -1].float() == 448
    assert transposed.values[-1, m - 1].float() == 448
    assert rows.values[0, 5].float() == transposed.values[5, 0].float() == (-448 if is_rowwise else -144)
    assert transposed.values[:, m:].float().abs().sum() == 0


@recipes
def test_the_mlp_saves_gate_up_and_a_byte_for_each_input(recipe):
    tokens, hidden, inner = 4096, 1024, 4096
    x, weights = _leaf(tokens, hidden), [_leaf(inner, hidden), _leaf(inner, hidden), _leaf(hidden, inner)]
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = fp8_glu_mlp(x, *weights, recipe=recipe)
        saved = torch.cuda.memory_allocated() - before - y.nbytes
        del y
    expected = 2 * 2 * tokens * inner + tokens * hidden
    assert expected <= saved <= expected + 2**20


@pytest.fixture
def _needs_grouped_units():
    if not has_grouped_units(torch.empty(0, device="cuda")):
        pytest.skip("torch has no grouped products in FP8 for this GPU")


def _routed(tokens: int, choices: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights. The first expert is not chosen, and some are of another rank."""
    scores = torch.randn(tokens, experts, device="cuda")
    scores[:, 0] = -torch.inf
    weights, index = scores.softmax(-1).topk(choices)
    index[::7, -1] = experts
    return index, weights.requires_grad_()


@pytest.mark.usefixtures("_needs_grouped_units")
@pytest.mark.parametrize(
    ("hidden", "outputs", "experts"), [(2048, 1536, 128), (768, 2048, 128), (2880, 5760, 32), (16, 16, 3)], ids=str
)
def test_the_units_compute_the_products_of_groups(hidden, outputs, experts):
    """Rows of experts of other ranks come last, and their values are undefined."""
    index, _ = _routed(1001, 2, experts)
    routing = route(index, experts)
    rows = quantise_and_spread(_randn(1001, hidden), None, routing)
    weights = quantise_stack(_randn(experts, outputs, hidden, scale=hidden**-0.5), True, False).rows
    y, expected = (f(rows, weights, routing.ends, BF16) for f in (multiply_groups, emulate_groups))
    present = routing.ends[-1].item()
    assert present < len(y)
    # Rounding to bf16 errs by 0.17 %, and sums of fewer bits by less than 1 % of the result.
    assert _relative_error(y[:present], expected[:present]) < 0.01


@pytest.mark.parametrize("hidden", [2048, 2880, 7168, 20480])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["tokens", "weighted tokens"])
def test_kernels_write_the_bytes_of_the_reference_of_tokens(hidden, is_weighted):
    index, weights = _routed(515, 8, 32)
    routing, x = route(index, 32), _randn(515, hidden)
    weights = weights.detach() if is_weighted else None
    actual, expected = (f(x, weights, routing) for f in (quantise_and_spread, quantise_and_spread_reference))
    present = routing.ends[-1].item()
    assert torch.equal(actual.values[:present].view(torch.uint8), expected.values[:present].view(torch.uint8))
    assert torch.equal(actual.scale[:present], expected.scale[:present])


ACTIVATIONS = {"silu": "silu", "no gate": "relu2", "a function": lambda h: h[..., ::2] * h[..., 1::2].sigmoid()}


@pytest.mark.usefixtures("_needs_grouped_units")
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_experts_never_wait_and_a_replayed_graph_reads_the_weights_that_it_finds(activation):
    tokens, hidden, inner, experts, cache = 2048, 512, 768, 8, WeightCache()
    index, weights = _routed(tokens, 2, experts)
    up = _leaf(experts, hidden, inner if activation == "relu2" else 2 * inner, scale=0.05)
    leaves = [_leaf(tokens, hidden), up, _leaf(experts, inner, hidden, scale=0.05), weights]

    def step(cache: WeightCache | None = None) -> list[Tensor]:
        x, up, down, weights = leaves
        parameters, options = ExpertParameters(up, down, None, None), {"activation": activation, "transposed": True}
        y = moe_mlp_in_fp8(x, parameters, index, weights, cache=cache, **options)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    # The first run compiles kernels and allocates workspaces.
    step(cache), step()
    with no_waits():
        step(cache), step()
    captured = _replay_with_other_values(step, leaves[:3])
    for a, b in zip(captured, step(), strict=True):
        assert _relative_error(a, b) < 0.01
