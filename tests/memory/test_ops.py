"""In `lean` a product does not save the result of an op that is cheap, and every gradient has the same bits."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from memory.steps import HEADS, ROWS, WIDTH, Step, assert_same_bits, normal, run, total


def product_of(op, *inputs: str):
    """Return a product of op(...). "x" is an input, "w" a weight [WIDTH], "taps" a weight [WIDTH, 4].

    "packed" is an input of twice the width.
    """

    def forward(step: Step) -> Tensor:
        factories = {"x": step.x, "w": step.weight, "packed": lambda: step.x(*ROWS, 2 * WIDTH)}
        factories["taps"] = lambda: step.weight(WIDTH, 4)
        y = op(*(factories[name]() for name in inputs))
        step.watch(y=y)
        return total(step.product(y))

    return forward


def added_norm(step: Step) -> Tensor:
    y, residual = tigon.add_rms_norm(step.x(), step.x(), step.weight(), 1e-5, offset=1.0)
    step.watch(y=y)
    return total(step.product(y), residual)


def gated_norm(step: Step) -> Tensor:
    """Return a product of a gate of a norm. The input of the norm suffices to recompute both."""
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
    # A copy of k is saved, with and without lean.
    step.watch(q=q)
    return attend(q, k)


def norms_then_rope(step: Step) -> Tensor:
    q, k = (tigon.rms_norm(heads(step, n), step.weight(8)) for n in (HEADS, 2))
    step.watch(norm=q)
    q, k = tigon.rope(q, k, *tables(step))
    step.watch(q=q)
    return attend(q, k)


CASES = {
    "rms_norm": product_of(tigon.rms_norm, "x", "w"),
    "rms_norm, rounded after": product_of(
        functools.partial(tigon.rms_norm, offset=1.0, rounding="after_weight"), "x", "w"
    ),
    "rms_norm, no weight": product_of(lambda x: tigon.rms_norm(x, None), "x"),
    "gated_rms_norm": product_of(tigon.gated_rms_norm, "x", "x", "w"),
    "gated_rms_norm, gate first": product_of(functools.partial(tigon.gated_rms_norm, gate_first=True), "x", "x", "w"),
    "layer_norm": product_of(tigon.layer_norm, "x", "w", "w"),
    "layer_norm, no weight": product_of(tigon.layer_norm, "x"), "swiglu": product_of(tigon.swiglu, "x", "x"),
    "swiglu, packed": product_of(tigon.swiglu, "packed"), "geglu": product_of(tigon.geglu, "x", "x"),
    "geglu, tanh": product_of(functools.partial(tigon.geglu, approximate="tanh"), "x", "x"),
    "gelu": product_of(tigon.gelu, "x"), "relu2": product_of(tigon.relu2, "x"),
    "causal_conv1d": product_of(lambda x, w: tigon.causal_conv1d(x, w), "x", "taps"),
    "causal_conv1d, channels first": product_of(
        lambda x, w: tigon.causal_conv1d(x.mT, w, channels_last=False).mT, "x", "taps"
    ),
    "add_rms_norm": added_norm, "gated norm": gated_norm, "qk_norm_rope": normed_heads,
    "norms of heads, then rope": norms_then_rope,
}  # fmt: skip
# The tensors that are alive without lean, if these are not {"y"}.
ALIVE = {"gated norm": {"y", "z"}, "norms of heads, then rope": {"q"}, "qk_norm_rope": {"q"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_recomputed(name, dtype):
    alive, expected = run(CASES[name], False, dtype)
    assert alive >= ALIVE.get(name, {"y"})
    alive, actual = run(CASES[name], True, dtype)
    assert not alive
    assert_same_bits(actual, expected)


def test_rotated_heads_without_norms_are_saved():
    """Otherwise the heads before the rotation would have to be saved."""

    def forward(step: Step) -> Tensor:
        q, k = heads(step, HEADS), heads(step, 2)
        step.watch(before=q)
        q, k = tigon.rope(q, k, *tables(step))
        step.watch(q=q)
        return attend(q, k)

    alive, expected = run(forward, False)
    assert alive == {"q"}
    alive, actual = run(forward, True)
    assert alive == {"q"}
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (WIDTH,), (2, 0, WIDTH)], ids=str)
def test_lean_accepts_few_rows(shape):
    forward = lambda step: total(step.product(tigon.rms_norm(step.x(*shape), step.weight())))
    assert_same_bits(run(forward, True)[1], run(forward, False)[1])


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
def test_the_result_of_an_op_without_gradients_is_saved(frozen):
    """An op whose inputs need no gradient saves nothing, so it could not be recomputed."""

    def forward(step: Step) -> Tensor:
        x, w = step.x(), step.weight()
        x = x.detach() if frozen != "weight" else x
        y = tigon.rms_norm(x, w.requires_grad_(frozen == "input"))
        step.watch(y=y)
        return total(step.product(y))

    alive, expected = run(forward, False)
    assert alive == {"y"}
    alive, actual = run(forward, True)
    assert alive == ({"y"} if frozen == "both" else set())
    assert_same_bits(actual, expected)


def test_products_with_frozen_weights_recompute_nothing():
    """Only the gradient of y is needed, and the product saves nothing for it."""
    x, calls = normal(0, 3, WIDTH).requires_grad_(), []
    op = tigon.memory.lean.recomputed_by_call(lambda x: calls.append(1) or tigon.relu2(x))
    with tigon.lean():
        z = F.linear(op(x * 2), normal(1, 5, WIDTH))
    z.sum().backward()
    assert len(calls) == 1
