"""Tests of FP8 ops that need a GPU: the units against the emulation, waits, CUDA graphs, large addresses, memory."""

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops.fp8.formats import Factor, has_units
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_linear_reference, fp8_projections
from tigon.ops.fp8.products import emulate_fp8, multiply_fp8
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_reference
from tigon.ops.fp8.weights import WeightCache
from tigon.runtime.device import device_of

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
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


# --- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 7, 128, 1000])
@recipes
def test_the_units_compute_what_the_emulation_computes(recipe, m, out_dtype, dtype, is_fast):
    is_rowwise = recipe == "rowwise"
    a = quantise_reference(_randn(m, 4096), Layout(dtype, is_rowwise, True, False))
    b = quantise_reference(_randn(256, 4096, scale=1 / 64), Layout(E4M3, is_rowwise, True, False))
    factors = Factor(*a[:2]), Factor(*b[:2])
    bias = torch.randn(256, device="cuda").to(out_dtype)
    y = multiply_fp8(*factors, out_dtype, bias, is_fast)
    exact = emulate_fp8(*factors, torch.float64, bias.double())
    assert y.dtype == out_dtype
    # Rounding to bf16 errs by 0.17 %, and sums of fewer bits by less than 1 % of the result.
    assert _relative_error(y, exact) < (0.01 if is_fast else 0.003)


@pytest.mark.parametrize("is_rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [(8192, 4096), (1000, 14336), (3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_kernels_write_the_bytes_of_the_reference(shape, dtype, is_rowwise):
    x = _randn(*shape) * torch.randn(shape[1], device="cuda").exp()
    for copies in ((True, True), (True, False), (False, True)):
        layout = Layout(dtype, is_rowwise, *copies)
        actual, expected = quantise([x], layout), quantise_reference(x, layout)
        for factor, values, scale in zip(actual, expected[::2], expected[1::2], strict=True):
            assert (factor is None) == (values is None)
            if factor is not None:
                assert torch.equal(factor.values.view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(factor.scale, scale)


# --- ops -------------------------------------------------------------------------------------------


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
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@recipes
@modes
def test_a_replayed_graph_reads_the_weights_that_it_finds(recipe, fp8_dw):
    leaves, cache = _mlp(), WeightCache()

    def step() -> list[Tensor]:
        y = fp8_glu_mlp(*leaves, recipe=recipe, fp8_dw=fp8_dw, caches=cache)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(-1.5)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_matrices_of_more_than_2_31_values(is_rowwise):
    m, k = 2**18 + 3, 8192
    x = torch.zeros(m, k, device="cuda", dtype=BF16)
    x[-1, -1], x[0, 5] = 3.0, -1.0
    rows, transposed = quantise([x], Layout(E4M3, is_rowwise, True, True))
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
