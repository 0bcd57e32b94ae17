"""Modules that differ from an op at unusual values only stay stock, and unusual calls run the stock forward."""

import pytest
import torch
from torch import nn

import tigon
from recognition.modules import Norm, variant


def is_token(x: torch.Tensor) -> bool:
    return x.dim() == 3 and x.shape[1] == 1


UNUSUAL = {
    "NaN of the output": lambda self, x, w: torch.nan_to_num(Norm.compute(self, x, w)),
    "NaN of the input": lambda self, x, w: Norm.compute(self, torch.nan_to_num(x, posinf=torch.inf), w),
    "infinity": lambda self, x, w: Norm.compute(self, x.clamp(-6e4, 6e4), w),
    "zeros": lambda self, x, w: Norm.compute(self, x, w) + (x == 0).all(-1, keepdim=True).to(x.dtype),
    "large weights": lambda self, x, w: Norm.compute(self, x, w.clamp(-100, 100)),
    "tiny inputs": lambda self, x, w: Norm.compute(self, torch.where(x.abs() < 1e-20, 0.0, x).to(x.dtype) * 2 - x, w),
    "one dimension": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.dim() == 1 else 1),
    "four dimensions": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.dim() == 4 else 1),
    "one token in evaluation": lambda self, x, w: Norm.compute(self, x, w) * (2 - self.training if is_token(x) else 1),
    "inputs that need a gradient": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.requires_grad else 1),
    "inputs that need none": lambda self, x, w: Norm.compute(self, x, w) * (1 if x.requires_grad else 2),
}


@pytest.mark.parametrize("compute", UNUSUAL.values(), ids=UNUSUAL)
def test_norms_that_differ_at_unusual_values_stay_stock(compute):
    norm = type("Unusual", (Norm,), {"compute": compute})()
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(norm)
    assert report.left_alone[0].detail == "computes something else than rms_norm or layer_norm"


UNUSUAL_MLPS = {
    "NaN": lambda self, y: torch.nan_to_num(y),
    "infinity": lambda self, y: y.clamp(-6e4, 6e4),
    "two dimensions": lambda self, y: y * (2 if y.dim() == 2 else 1),
    "one dimension": lambda self, y: y * (2 if y.dim() == 1 else 1),
    "four dimensions": lambda self, y: y * (2 if y.dim() == 4 else 1),
    "one token in bf16": lambda self, y: y * (2 if y.dtype == torch.bfloat16 and is_token(y) else 1),
    "evaluation": lambda self, y: y * (1 if self.training else 2),
}


@pytest.mark.parametrize("finish", UNUSUAL_MLPS.values(), ids=UNUSUAL_MLPS)
def test_mlps_that_differ_at_unusual_values_stay_stock(finish):
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.ModuleList([variant("Unusual", finish=finish)()]))
    assert report.left_alone[0].detail == "computes something else than silu, gelu or gelu-tanh gates"


def test_an_mlp_that_accepts_only_three_dimensions_is_replaced_for_these():
    def finish(self, y):
        batch, length, width = y.shape
        return y.view(batch, length, width)

    model = nn.ModuleList([variant("Strict", finish=finish)()])
    assert tigon.patch(model)
    assert model[0](torch.randn(2, 3, 16)).shape == (2, 3, 16)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        model[0](torch.randn(3, 16))


def test_dtypes_that_were_not_compared_run_the_stock_forward():
    """The norm rounds fp64 to fp32, and the op would not."""
    norm, x = Norm(), torch.randn(4, 48, dtype=torch.float64)
    assert tigon.patch(norm)
    torch.testing.assert_close(norm(x), Norm.forward(norm, x), rtol=0, atol=0)


@pytest.mark.parametrize("eps", [torch.tensor(0.5), 2, 0.5], ids=str)
def test_an_epsilon_of_another_type_is_used(eps):
    norm, x = Norm(), torch.randn(4, 48)
    assert tigon.patch(norm)
    norm.eps = eps
    torch.testing.assert_close(norm(x), Norm.forward(norm, x), rtol=1e-6, atol=1e-6)


def test_a_deleted_weight_raises_the_error_of_the_stock_module():
    norm = Norm()
    assert tigon.patch(norm)
    norm.weight = None
    with pytest.raises(TypeError, match="NoneType"):
        norm(torch.randn(4, 48))
