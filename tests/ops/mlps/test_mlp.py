"""The MLP of two linear layers computes the products of eager code. Every level of memory has the same bits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tigon
from mlp_cases import HIDDEN, INNER, LEVELS, OUT, gradients_of, run_at
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, saved_tensors

ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": lambda h: h * torch.sigmoid(1.702 * h), "relu2": lambda h: F.relu(h).square(),
}  # fmt: skip


def _inputs(*leading: int, dtype: torch.dtype = torch.float32, transposed: bool = False) -> list[Tensor]:
    """Return x, both weights and both biases. `transposed` weights have the layout of `Conv1D` of transformers."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*leading, HIDDEN), (INNER, HIDDEN), (OUT, INNER), (INNER,), (OUT,)
    scales = 1.0, 0.2, 0.2, 1.0, 1.0
    tensors = [torch.randn(n, generator=generator) * scale for n, scale in zip(shapes, scales, strict=True)]
    if transposed:
        tensors[1:3] = [w.t().contiguous().t() for w in tensors[1:3]]
    return [x.to(DEVICE, dtype).requires_grad_() for x in tensors]


@one_in(8, level=LEVELS, activation=list(ACTIVATIONS), leading=[(1,), (3, 17)], transposed=[False, True], dtype=DTYPES)
def test_mlp_accuracy(level, activation, leading, transposed, dtype):
    def reference(x, up, down, up_bias, down_bias):
        return F.linear(ACTIVATIONS[activation](F.linear(x, up, up_bias)), down, down_bias)

    inputs = _inputs(*leading, dtype=dtype, transposed=transposed)
    assert_as_accurate_as_eager(partial(run_at, level, tigon.mlp, activation=activation), reference, inputs)


@pytest.mark.kernels
@pytest.mark.parametrize(("level", "hidden_count"), [("default", 1), ("lean", 1), ("lean+mlp", 0)])
def test_mlp_saves_the_input_and_at_most_one_wide_tensor(level, hidden_count):
    inputs = _inputs(2, 9)
    shapes = {t.data_ptr(): t.shape for t in saved_tensors(lambda: run_at(level, tigon.mlp, *inputs))}
    activations = [shape for pointer, shape in shapes.items() if pointer not in {p.data_ptr() for p in inputs[1:]}]
    assert [shape[-1] for shape in activations].count(INNER) == hidden_count
    assert len(activations) == 1 + hidden_count


@pytest.mark.kernels
def test_checkpointing_does_not_repeat_the_last_product():
    """The forward has two products, the second run repeats one of them, and backward has four."""
    inputs = _inputs(2, 9)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(run_at("checkpoint", tigon.mlp, *inputs).sum(), inputs)
    first, last = 2 * 18 * HIDDEN * INNER, 2 * 18 * INNER * OUT
    assert counter.get_total_flops() == 4 * first + 3 * last


@pytest.mark.kernels
def test_the_gradient_of_a_transposed_weight_is_not_copied():
    inputs = _inputs(2, 9, transposed=True)
    _, *gradients = gradients_of(tigon.mlp(*inputs), inputs)
    assert [g.stride() for g in gradients[1:3]] == [w.stride() for w in inputs[1:3]]
