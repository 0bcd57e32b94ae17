import pytest
import torch
import torch.nn.functional as F

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_refused, one_in
from tigon.ops.norms.kernels import NormConfig
from tigon.ops.norms.layer_norm import layer_norm_reference
from tigon.runtime.tuning import tuned

# Rows that fill no tile, widths on both sides of a power of two.
SHAPES = [(3, 5), (2, 3, 64), (17, 127), (5, 129), (3, 2048), (2, 5000)]
HALF, FULL = torch.float16, torch.float32


def _inputs(shape: tuple[int, ...], *dtypes: torch.dtype, mean: float = 0.5) -> list[torch.Tensor]:
    """Return x, and then the weight and the bias if there are further dtypes."""
    generator = torch.Generator().manual_seed(sum(shape))
    tensors = [torch.randn(shape, generator=generator) * 3 + mean]
    tensors += [torch.randn(shape[-1], generator=generator) for _ in dtypes[1:]]
    return [t.to(DEVICE, d).requires_grad_() for t, d in zip(tensors, dtypes, strict=True)]


@pytest.mark.kernels
@one_in(2, shape=SHAPES, dtype=DTYPES, parameters={"plain": 0, "weight": 1, "weight and bias": 2})
def test_layer_norm_accuracy(shape, dtype, parameters):
    assert_as_accurate_as_eager(
        lambda *tensors: tigon.layer_norm(*tensors, eps=1e-3),
        lambda *tensors: layer_norm_reference(*tensors, eps=1e-3), _inputs(shape, *[dtype] * (parameters + 1)),
    )  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("keeps_row", [False, True], ids=["row loaded twice", "row in registers"])
def test_layer_norm_loads_the_weight_of_wide_rows_for_every_tile(keeps_row):
    with tuned(NormConfig, keeps_w=False, keeps_row=keeps_row):
        assert_as_accurate_as_eager(tigon.layer_norm, layer_norm_reference, _inputs((9, 100), FULL, FULL, FULL))


@pytest.mark.kernels
def test_layer_norm_accepts_a_bias_without_a_weight():
    x, bias = _inputs((5, 33), FULL, FULL)
    assert_as_accurate_as_eager(
        lambda x, b: tigon.layer_norm(x, None, b), lambda x, b: layer_norm_reference(x, None, b), [x, bias]
    )


def test_layer_norm_agrees_with_torch():
    tensors = _inputs((5, 33), FULL, FULL, FULL)
    torch.testing.assert_close(tigon.layer_norm(*tensors), F.layer_norm(tensors[0], (33,), *tensors[1:]))
    torch.testing.assert_close(tigon.layer_norm(tensors[0], eps=0.1), F.layer_norm(tensors[0], (33,), eps=0.1))


def test_layer_norm_of_one_feature_is_the_bias():
    x, weight = torch.randn(6, 1, device=DEVICE, requires_grad=True), torch.randn(1, device=DEVICE)
    y = tigon.layer_norm(x, weight, weight)
    assert (y == weight).all()
    # dx is (dy - mean(dy)) / sqrt(eps), which is 0.
    assert torch.autograd.grad(y.sum(), x)[0].abs().max() < 1e-3


@pytest.mark.kernels
def test_layer_norm_is_accurate_for_a_large_mean():
    """In fp32 E[x^2] - E[x]^2 would have no correct digit here. The mean of the centred squares has all digits."""
    assert_as_accurate_as_eager(tigon.layer_norm, layer_norm_reference, _inputs((4, 96), FULL, FULL, FULL, mean=3000.0))


@pytest.mark.kernels
@pytest.mark.parametrize("dtypes", [(HALF, FULL, FULL), (HALF, HALF, FULL), (FULL, HALF, HALF)], ids=str)
def test_layer_norm_returns_the_dtype_of_x(dtypes):
    tensors = _inputs((4, 96), *dtypes)
    assert_as_accurate_as_eager(tigon.layer_norm, layer_norm_reference, tensors)
    y = tigon.layer_norm(*tensors)
    assert y.dtype == dtypes[0]
    assert tuple(g.dtype for g in torch.autograd.grad(y.sum(), tensors)) == dtypes


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_module_agrees_with_torch_and_loads_its_state(options):
    ours, theirs = (module(48, eps=1e-4, **options).to(DEVICE) for module in (tigon.LayerNorm, torch.nn.LayerNorm))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 48, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert isinstance(ours, torch.nn.LayerNorm)


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_layer_norm_refuses_bad_input():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    changes = {
        r"weight must have shape \(8,\), got \(7,\)": {"weight": weight[:7]},
        r"bias must have shape \(8,\), got \(1, 8\)": {"bias": weight[None]},
        "x must be a float32, bfloat16 or float16 tensor, got torch.int64": {"x": x.long()},
        "x must be a Tensor, got NoneType": {"x": None}, "bias must be a Tensor, got int": {"bias": 0},
        "eps must be finite and not negative, got nan": {"eps": float("nan")},
        "x and bias must have the same device": {"bias": weight.to("meta")},
        "x must have at least one dimension, got a scalar": {"x": x[0, 0]},
    }  # fmt: skip
    assert_refused(tigon.layer_norm, {"x": x, "weight": weight, "bias": weight}, changes)
    with pytest.raises(ValueError, match=r"LayerNorm: the last dimension of x must have size 8, got shape \(3, 9\)"):
        tigon.LayerNorm(8)(torch.randn(3, 9))
    with pytest.raises(ValueError, match=r"LayerNorm: normalized_shape must have one dimension, got \(3, 8\)"):
        tigon.LayerNorm((3, 8))
