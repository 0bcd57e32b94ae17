"""Every op whose results are cheap: in `lean` a product keeps none of them, and every gradient has the same bits."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from memory.steps import HEADS, ROWS, WIDTH, Step, assert_same_bits, normal, run, total


def of_one(op, *inputs: str):
    """A product of op(...): `x` is an input, `w` a weight [WIDTH], `packed` an input of twice the width."""

    def forward(step: Step) -> Tensor:
        make = {"x": step.x, "w": step.weight, "packed": lambda: step.x(*ROWS, 2 * WIDTH)}
        y = op(*(make[name]() for name in inputs))
        step.watch(y=y)
        return total(step.product(y))

    return forward


def added_norm(step: Step) -> Tensor:
    y, residual = tigon.add_rms_norm(step.x(), step.x(), step.weight(), 1e-5, offset=1.0)
    step.watch(y=y)
    return total(step.product(y), residual)


def gated_norm(step: Step) -> Tensor:
    """Of a norm, which the gate saves, a product: what the norm was given makes both again."""
    y = tigon.rms_norm(step.x(), step.weight())
    z = tigon.swiglu(step.x(), y)
    step.watch(y=y, z=z)
    return total(step.product(z))


def heads(step: Step, n: int) -> Tensor:
    return step.x(2, 7, n, 8).transpose(1, 2)


def tables(step: Step) -> tuple[Tensor, Tensor]:
    angles = step.constant(99, 1, 7, 8)
    return angles.cos(), angles.sin()


def attend(q: Tensor, k: Tensor) -> Tensor:
    return total(q * k.repeat_interleave(2, 1))


def normed_heads(step: Step) -> Tensor:
    q, k = tigon.qk_norm_rope(heads(step, HEADS), heads(step, 2), step.weight(8), step.weight(8), *tables(step))
    step.watch(q=q)  # of k a copy is saved, as it is without lean
    return attend(q, k)


def norms_then_rope(step: Step) -> Tensor:
    q, k = (tigon.rms_norm(heads(step, n), step.weight(8)) for n in (HEADS, 2))
    step.watch(norm=q)
    q, k = tigon.rope(q, k, *tables(step))
    step.watch(q=q)
    return attend(q, k)


CASES = {
    "rms_norm": of_one(tigon.rms_norm, "x", "w"),
    "rms_norm, rounded after": of_one(functools.partial(tigon.rms_norm, offset=1.0, rounding="after_weight"), "x", "w"),
    "rms_norm, no weight": of_one(lambda x: tigon.rms_norm(x, None), "x"),
    "layer_norm": of_one(tigon.layer_norm, "x", "w", "w"),
    "layer_norm, no weight": of_one(tigon.layer_norm, "x"),
    "swiglu": of_one(tigon.swiglu, "x", "x"),
    "swiglu, packed": of_one(tigon.swiglu, "packed"),
    "geglu": of_one(tigon.geglu, "x", "x"),
    "geglu, tanh": of_one(functools.partial(tigon.geglu, approximate="tanh"), "x", "x"),
    "relu2": of_one(tigon.relu2, "x"),
    "add_rms_norm": added_norm,
    "gated norm": gated_norm,
    "qk_norm_rope": normed_heads,
    "norms of heads, then rope": norms_then_rope,
}
KEPT = {"gated norm": {"y", "z"}, "norms of heads, then rope": {"q"}, "qk_norm_rope": {"q"}}  # without lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_made_again(name, dtype):
    kept, expected = run(CASES[name], False, dtype)
    assert kept >= KEPT.get(name, {"y"})
    kept, given = run(CASES[name], True, dtype)
    assert not kept
    assert_same_bits(given, expected)


def test_turned_heads_without_norms_are_kept():
    """What they were turned from would have to be kept in their place."""

    def forward(step: Step) -> Tensor:
        q, k = heads(step, HEADS), heads(step, 2)
        step.watch(before=q)
        q, k = tigon.rope(q, k, *tables(step))
        step.watch(q=q)
        return attend(q, k)

    kept, expected = run(forward, False)
    assert kept == {"q"}
    kept, given = run(forward, True)
    assert kept == {"q"}
    assert_same_bits(given, expected)


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (WIDTH,), (2, 0, WIDTH)], ids=str)
def test_few_rows(shape):
    forward = lambda step: total(step.product(tigon.rms_norm(step.x(*shape), step.weight())))
    assert_same_bits(run(forward, True)[1], run(forward, False)[1])


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
def test_frozen(frozen):
    """Where nothing flows back through the op, nothing of it is kept either: then its result is."""

    def forward(step: Step) -> Tensor:
        x, w = step.x(), step.weight()
        x = x.detach() if frozen != "weight" else x
        y = tigon.rms_norm(x, w.requires_grad_(frozen == "input"))
        step.watch(y=y)
        return total(step.product(y))

    kept, expected = run(forward, False)
    assert kept == {"y"}
    kept, given = run(forward, True)
    assert kept == ({"y"} if frozen == "both" else set())
    assert_same_bits(given, expected)


def test_frozen_products_save_nothing():
    """Only the gradient of y is asked for: there is nothing to make again."""
    x, calls = normal(0, 3, WIDTH).requires_grad_(), []
    again = tigon.memory.lean.recomputed_by_call(lambda x: calls.append(1) or tigon.relu2(x))
    with tigon.lean():
        z = F.linear(again(x * 2), normal(1, 5, WIDTH))
    z.sum().backward()
    assert len(calls) == 1
