"""The gated MLP in tiles of tokens has the values of one tile, and holds no gate and up of all tokens."""

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tigon
from mlp_cases import HIDDEN, INNER, assert_equal, gradients_of, run_at
from op_cases import DTYPES, assert_as_accurate_as_eager, one_in, saved_tensors
from tigon.memory.lean import recompute_large_mlps
from tigon.ops.mlps import tiled_glu_mlp
from tigon.ops.mlps.tiled_glu_mlp import tile_rows

from .test_glu_mlp import REFERENCES, _inputs

pytestmark = pytest.mark.kernels

# The forward passes in which backward recomputes gate and up of a large MLP.
PLACES = "checkpoint", "lean+mlp", "last layer"
ROWS = 21


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Compute 21 tokens in tiles of 8, 8 and 5."""
    monkeypatch.setattr(tiled_glu_mlp, "ALIGNMENT", 8)
    monkeypatch.setattr(tiled_glu_mlp, "TILE_BYTES", 3 * INNER * 4 * 8)


def _mlp(place: str, *inputs: Tensor, **options: object) -> Tensor:
    if place != "last layer":
        return run_at(place, tigon.glu_mlp, *inputs, **options)
    with tigon.lean(), recompute_large_mlps():
        return tigon.glu_mlp(*inputs, **options)


def _results(place: str, inputs: list[Tensor], tile_bytes: int | None = None) -> list[Tensor]:
    """Return the output and all gradients, in tiles of 8 tokens unless `tile_bytes` is given."""
    with contextlib.nullcontext() if tile_bytes is None else mock.patch.object(tiled_glu_mlp, "TILE_BYTES", tile_bytes):
        return gradients_of(_mlp(place, *inputs), inputs)


@pytest.fixture
def tiles(monkeypatch) -> list[int]:
    """Return a list that gets the number of tokens of every product of gate and up in tiles."""
    rows, multiply = [], tiled_glu_mlp.multiply_gates
    monkeypatch.setattr(tiled_glu_mlp, "multiply_gates", lambda x, *w: (rows.append(len(x)), multiply(x, *w))[1])
    return rows


@one_in(3, place=PLACES, activation=list(REFERENCES), dtype=DTYPES)
def test_tiles_are_as_accurate_as_eager(place, activation, dtype, tiles):
    def reference(x, gate, up, down):
        gate, up = (x @ gate.t() * 0.6).clamp(max=0.5), (x @ up.t()).clamp(-0.5, 0.5)
        return REFERENCES[activation](gate, up) @ down.t() * -1.75

    run = partial(_mlp, place, activation=activation, gate_scale=0.6, output_scale=-1.75, limit=0.5)
    # The tiles of half-precision tensors have 16 tokens.
    assert_as_accurate_as_eager(run, reference, _inputs(3, 7, dtype=dtype))
    assert tiles[:2] == ([8, 8] if dtype == torch.float32 else [16, 5])


@one_in(3, place=PLACES, frozen=[(), (0,), (1, 2), (3,), (1, 2, 3), (0, 1, 2), (0, 3)])
def test_results_are_those_of_one_tile(place, frozen, tiles):
    """y and dx have the same sums. The gradients of weights add the products of tiles in another order."""
    inputs = _inputs(3, 7)
    for i in frozen:
        inputs[i].requires_grad_(False)
    results = _results(place, inputs)
    assert tiles == [8, 8, 5] * 2
    torch.testing.assert_close(results, _results(place, inputs, 2**40), rtol=1e-6, atol=1e-5)


def test_half_precision_gradients_of_weights_are_rounded_once():
    """Sums that are rounded after each of 16 tiles would have several times the error of one product."""
    inputs = _inputs(1, 128, dtype=torch.float16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    errors = []
    for tile in (3 * INNER * 2 * 8, 2**40):
        with mock.patch.object(tiled_glu_mlp, "TILE_BYTES", tile):
            gradients = torch.autograd.grad(_mlp("lean+mlp", *inputs).sum(), inputs[1:])
        x, gate, up, down = exact
        expected = torch.autograd.grad((REFERENCES["silu"](x @ gate.t(), x @ up.t()) @ down.t()).sum(), exact[1:])
        errors.append([(a - b).norm() / b.norm() for a, b in zip(gradients, expected, strict=True)])
    for tiled, single in zip(*errors, strict=True):
        assert tiled <= 1.2 * single


def test_the_second_run_of_a_checkpoint_computes_no_product():
    """The forward has three products, and backward eight: gate and up again, and six gradients."""
    inputs = _inputs(1, ROWS)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(_mlp("checkpoint", *inputs).sum(), inputs)
    assert counter.get_total_flops() == 11 * 2 * ROWS * HIDDEN * INNER


@pytest.mark.parametrize("place", PLACES)
def test_only_the_input_is_saved(place):
    inputs = _inputs(1, ROWS)
    shapes = [tuple(t.shape) for t in saved_tensors(lambda: _mlp(place, *inputs))]
    assert all(shape[-2:] != (ROWS, INNER) for shape in shapes)
    assert sum(shape[-2:] == (ROWS, HIDDEN) for shape in shapes) == 1


@pytest.mark.parametrize("place", PLACES)
def test_a_second_backward_gives_the_same_gradients(place):
    inputs = _inputs(3, 7)
    loss = _mlp(place, *inputs).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert_equal(first, second)
    with pytest.raises(RuntimeError, match="a second time|modified by an inplace"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("level", ["default", "lean"])
def test_gate_and_up_that_are_saved_are_not_computed_in_tiles(level, tiles):
    inputs = _inputs(1, ROWS)
    with tigon.lean() if level == "lean" else contextlib.nullcontext():
        tigon.glu_mlp(*inputs).sum().backward()
    with torch.no_grad():
        tigon.glu_mlp(*inputs)
    assert not tiles


def test_tiles_are_even_and_aligned(monkeypatch):
    monkeypatch.undo()
    rows = lambda tokens: tile_rows(torch.empty(tokens, 4096, device="meta", dtype=torch.bfloat16), weight)
    weight = torch.empty(14336, 4096, device="meta", dtype=torch.bfloat16)
    assert [rows(n) for n in (1, 8192, 49932)] == [0, 0, 0]
    assert rows(49933) == 25088
    assert rows(450_000) == 45056
    assert 10 * 45056 >= 450_000 > 9 * 45056
