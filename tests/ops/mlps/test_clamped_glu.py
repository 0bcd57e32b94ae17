"""SwiGLU with clamped inputs computes what eager code computes, also at the limits of the clamps."""

import pytest
import torch
from torch import Tensor

from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in
from tigon.ops.mlps.glu import ClampedGate

GATES = {
    "GPT-OSS": ClampedGate(1.5, 1.702, 1.0, is_interleaved=True),
    "MiniMax M3": ClampedGate(1.5, 1.702, 1.0),
    "DeepSeek V4": ClampedGate(1.5),
    "DeepSeek V4, interleaved": ClampedGate(1.5, is_interleaved=True),
}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 2).to(DEVICE, dtype).requires_grad_()


@one_in(2, gate=GATES, dtype=DTYPES, shape=[(5, 2 * 33), (2, 3, 2 * 48), (1, 2 * 1100)])
def test_clamped_glu_accuracy(gate, dtype, shape):
    assert_as_accurate_as_eager(gate, gate.reference, [_input(*shape, dtype=dtype)])


@every_gate
def test_values_at_and_beyond_the_limits_have_the_gradients_of_clamp(gate):
    values = torch.tensor([1.5, -1.5, 1.6, -1.6, 0.0, torch.nan, torch.inf, -3e4])
    h = torch.cartesian_prod(values, values)[None].reshape(1, -1).to(DEVICE).requires_grad_()
    results = []
    for run in (gate, gate.reference):
        y = run(h)
        results.append((y, *torch.autograd.grad(y, h, torch.ones_like(y))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, equal_nan=True)


@every_gate
def test_strides_and_empty_inputs_are_supported(gate):
    h = _input(6, 4, 16)
    torch.testing.assert_close(gate(h.transpose(0, 1)), gate.reference(h.transpose(0, 1)))
    assert gate(h[:0]).shape == (0, 4, 8)


@pytest.mark.kernels
@every_gate
def test_only_the_input_is_saved(gate):
    h, saved = _input(3, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gate(h)
    assert [t.data_ptr() for t in saved] == [h.data_ptr()]
