import importlib

import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_refused, one_in, outputs_and_gradients
from tigon.ops.norms.gated_rms_norm import gated_rms_norm_reference

# Two features, rows that fill no tile, and widths on both sides of a power of two, with the size of a group.
SHAPES = [((6, 2), None), ((2, 3, 64), 16), ((17, 126), 63), ((5, 129), None), ((3, 2048), 512), ((2, 5000), None)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x, gate = (torch.randn(shape, generator=generator) * 3 for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator)
    dtypes = dtype, dtype, weight_dtype or dtype
    return [t.to(DEVICE, d).requires_grad_() for t, d in zip((x, gate, weight), dtypes, strict=True)]


@pytest.mark.kernels
@one_in(
    8, shape=SHAPES, dtype=DTYPES, gate_first=[False, True], activation=["silu", "sigmoid"],
    rounding=["before_weight", "after_weight"],
)  # fmt: skip
def test_gated_rms_norm_accuracy(shape, dtype, gate_first, activation, rounding):
    shape, group_size = shape
    options = {"gate_first": gate_first, "activation": activation, "rounding": rounding, "group_size": group_size}
    assert_as_accurate_as_eager(
        lambda x, gate, w: tigon.gated_rms_norm(x, gate, w, 1e-5, offset=0.5, **options),
        lambda x, gate, w: gated_rms_norm_reference(x, gate, w, 1e-5, offset=0.5, **options), _inputs(shape, dtype),
    )  # fmt: skip


MODULES = {
    "mamba2": ("mamba2.modeling_mamba2", "MambaRMSNormGated", {}, {"gate_first": True}),
    "zamba2": (
        "zamba2.modeling_zamba2", "Zamba2RMSNormGated", {"group_size": 16}, {"gate_first": True, "group_size": 16},
    ),
    "qwen3_next": ("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNormGated", {}, {}),
    "falcon_h1": (
        "falcon_h1.modeling_falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4, "norm_before_gate": False},
        {"gate_first": True, "group_size": 16, "rounding": "after_weight"},
    ),
    "falcon_h1, norm first": (
        "falcon_h1.modeling_falcon_h1", "FalconH1RMSNormGated", {}, {"rounding": "after_weight"},
    ),
}  # fmt: skip


@pytest.mark.no_interpreter("It launches no kernel.")
@one_in(1, model=list(MODULES), dtypes=[(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)])
def test_the_reference_computes_what_modules_of_transformers_compute(model, dtypes):
    """Bit for bit, and with the dtype of their output."""
    path, name, arguments, options = MODULES[model]
    x, gate, weight = (t.detach().cpu() for t in _inputs((2, 3, 64), *dtypes))
    module = getattr(importlib.import_module(f"transformers.models.{path}"), name)(64, eps=1e-5, **arguments)
    module.weight.data = weight
    expected, y = module(x, gate), gated_rms_norm_reference(x, gate, weight, 1e-5, **options)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.kernels
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_rms_norm_has_the_dtype_of_eager_code(gate_first):
    x, gate, weight = _inputs((4, 32), torch.float16, torch.float32)
    y, expected = (f(x, gate, weight, gate_first=gate_first) for f in (tigon.gated_rms_norm, gated_rms_norm_reference))
    assert y.dtype == expected.dtype == (torch.float32 if gate_first else torch.float16)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    gradients = torch.autograd.grad(y.sum(), (x, gate, weight))
    assert [g.dtype for g in gradients] == [torch.float16, torch.float16, torch.float32]


@pytest.mark.kernels
def test_gated_rms_norm_accepts_slices_of_a_projection():
    """The gate of Mamba 2 is a slice of the output of one projection, and its rows are longer than its width."""
    projected = torch.randn(2, 3, 160, device=DEVICE, requires_grad=True)
    weight = torch.randn(64, device=DEVICE)

    def run(op):
        gate, x, _ = projected.split([64, 64, 32], -1)
        return outputs_and_gradients(lambda p: op(x, gate, weight, gate_first=True), [projected])

    torch.testing.assert_close(run(tigon.gated_rms_norm), run(gated_rms_norm_reference))


@pytest.mark.kernels
@pytest.mark.parametrize("trained", range(3), ids=["x", "gate", "weight"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_rms_norm_computes_only_the_gradients_that_are_needed(trained, gate_first, monkeypatch):
    import tigon.ops.norms.gated_rms_norm as module

    results, backward = [], module.gated_norm_backward
    monkeypatch.setattr(module, "gated_norm_backward", lambda *args: results.append(backward(*args)) or results[-1])
    inputs = _inputs((4, 32), torch.float32)
    expected = torch.autograd.grad(gated_rms_norm_reference(*inputs, gate_first=gate_first).sum(), inputs)[trained]
    alone = [t if i == trained else t.detach() for i, t in enumerate(inputs)]
    (gradient,) = torch.autograd.grad(tigon.gated_rms_norm(*alone, gate_first=gate_first).sum(), alone[trained])
    torch.testing.assert_close(gradient, expected)
    assert [t is not None for t in results[0]] == [i == trained for i in range(3)]


def test_groups_that_are_too_wide_for_the_kernels_run_the_reference(monkeypatch):
    import tigon.ops.norms.gated_rms_norm as module

    monkeypatch.setattr(module, "gated_norm_forward", None)
    inputs = _inputs((2, 8193), torch.float32)
    assert torch.equal(tigon.gated_rms_norm(*inputs), gated_rms_norm_reference(*inputs))


def test_gated_rms_norm_refuses_bad_input():
    x, gate, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    changes = {
        r"gate must have shape \(4, 32\), got \(4, 16\)": {"gate": gate[:, :16]},
        r"weight must have shape \(32,\), got \(16,\)": {"weight": weight[:16]},
        "group_size must divide the 32 features of x, got 5": {"group_size": 5},
        "activation must be one of 'silu', 'sigmoid', got 'gelu'": {"activation": "gelu"},
        "gate_first must be a bool, got 'yes'": {"gate_first": "yes"}, "gate must be": {"gate": None},
    }  # fmt: skip
    assert_refused(tigon.gated_rms_norm, {"x": x, "gate": gate, "weight": weight}, changes)
