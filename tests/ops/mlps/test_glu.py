import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, saved_tensors
from tigon.ops.mlps.glu import ClampedGate, geglu_reference, swiglu_reference
from tigon.runtime.device import runs_kernels

KINDS = {
    "silu": (tigon.swiglu, swiglu_reference), "gelu": (tigon.geglu, geglu_reference),
    "gelu_tanh": (
        lambda gate, up=None: tigon.geglu(gate, up, approximate="tanh"),
        lambda gate, up=None: geglu_reference(gate, up, approximate="tanh"),
    ),
}  # fmt: skip
every_kind = pytest.mark.parametrize(("run", "reference"), KINDS.values(), ids=KINDS)


def _tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(DEVICE, dtype).requires_grad_()


@pytest.mark.kernels
@one_in(3, kind=KINDS, packed=[False, True], dtype=DTYPES, shape=[(1, 1), (5, 17), (2, 3, 64), (3, 1025), (2, 4096)])
def test_glu_accuracy(kind, packed, dtype, shape):
    run, reference = kind
    if packed:
        tensors = [_tensor(*shape[:-1], 2 * shape[-1], dtype=dtype)]
    else:
        tensors = [_tensor(*shape, dtype=dtype), _tensor(*shape, dtype=dtype, seed=1)]
    assert_as_accurate_as_eager(run, reference, tensors)


@pytest.mark.kernels
@every_kind
def test_glu_accepts_large_gates(run, reference):
    """The gate saturates. Nothing overflows, and the gradients become zero as in eager code."""
    gate = torch.tensor([[-1e4, -100.0, -20.0, -5.0, 0.0, 5.0, 20.0, 100.0, 1e4]], device=DEVICE, requires_grad=True)
    up = torch.ones_like(gate).detach().requires_grad_()
    assert_as_accurate_as_eager(run, reference, [gate, up])


@pytest.mark.kernels
def test_glu_computes_no_gradient_of_a_frozen_input(monkeypatch):
    import tigon.ops.mlps.glu as module

    calls, backward = [], module.glu_backward
    monkeypatch.setattr(module, "glu_backward", lambda *args: calls.append(backward(*args)) or calls[-1])
    gate, up = _tensor(4, 64), _tensor(4, 64, seed=1).detach()
    tigon.swiglu(gate, up).sum().backward()
    # The list is empty if no kernels run.
    if calls:
        assert [x.numel() for x in calls[-1]] == [256, 0]


def test_swiglu_accepts_rows_without_features():
    empty = torch.randn(3, 0, device=DEVICE)
    assert tigon.swiglu(empty, empty).shape == (3, 0)


@pytest.mark.kernels
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_swiglu_is_one_node_whose_result_may_be_written_in_place(packed):
    """A view outside the autograd function would be a second node. A view inside could not be written in place."""
    tensors = [_tensor(2, 3, 64, seed=seed) for seed in range(1 if packed else 2)]
    y = tigon.swiglu(*tensors)
    expected = torch.autograd.grad(y.sum(), tensors, retain_graph=True)
    if runs_kernels(y):
        assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node} == {"AccumulateGrad"}
    gradients = torch.autograd.grad(y.mul_(2).sum(), tensors)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, 2 * b)


@pytest.mark.parametrize("mlp", [tigon.SwiGLUMLP, tigon.GEGLUMLP])
def test_modules_have_the_parameters_of_transformers(mlp):
    module = mlp(8, 24, bias=True).to(DEVICE)
    assert set(module.state_dict()) == {
        f"{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")
    }
    x = torch.randn(2, 3, 8, device=DEVICE)
    activate = KINDS["silu" if mlp is tigon.SwiGLUMLP else "gelu_tanh"][1]
    expected = module.down_proj(activate(module.gate_proj(x), module.up_proj(x)))
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)


GATES = {
    "GPT-OSS": ClampedGate(1.5, 1.702, 1.0, is_interleaved=True), "MiniMax M3": ClampedGate(1.5, 1.702, 1.0),
    "DeepSeek V4": ClampedGate(1.5), "DeepSeek V4, interleaved": ClampedGate(1.5, is_interleaved=True),
}  # fmt: skip
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


@one_in(2, gate=GATES, dtype=DTYPES, shape=[(5, 2 * 33), (2, 3, 2 * 48), (1, 2 * 1100)])
def test_clamped_glu_accuracy(gate, dtype, shape):
    assert_as_accurate_as_eager(gate, gate.reference, [_tensor(*shape, dtype=dtype)])


@every_gate
def test_values_at_and_beyond_the_limits_have_the_gradients_of_clamp(gate):
    values = torch.tensor([1.5, -1.5, 1.6, -1.6, 0.0, torch.nan, torch.inf, -3e4])
    h = torch.cartesian_prod(values, values)[None].reshape(1, -1).to(DEVICE).requires_grad_()
    results = []
    for run in (gate, gate.reference):
        y = run(h)
        results.append((y, *torch.autograd.grad(y, h, torch.ones_like(y))))
    torch.testing.assert_close(*results, equal_nan=True)


@every_gate
def test_strides_and_empty_inputs_are_supported(gate):
    h = _tensor(6, 4, 16)
    torch.testing.assert_close(gate(h.transpose(0, 1)), gate.reference(h.transpose(0, 1)))
    assert gate(h[:0]).shape == (0, 4, 8)


@pytest.mark.kernels
@every_gate
def test_only_the_input_is_saved(gate):
    h = _tensor(3, 16)
    assert [t.data_ptr() for t in saved_tensors(lambda: gate(h))] == [h.data_ptr()]
