"""A shallow copy of a patched module has a forward of its own. TorchScript of a patched module is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

import tigon
from recognition.modules import Norm

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")


def by_dict_of_attributes(module):
    other = type(module).__new__(type(module))
    vars(other).update(vars(module))
    return other


def by_set_state(module):
    other = type(module).__new__(type(module))
    other.__setstate__(vars(module).copy())
    return other


@pytest.mark.parametrize("shallow", [copy.copy, by_dict_of_attributes, by_set_state], ids=lambda f: f.__name__)
def test_a_patch_gives_a_shallow_copy_a_forward_of_its_own(shallow):
    """A shallow copy of a restored module is stock."""
    norm, x = Norm(), torch.randn(4, 48)
    tigon.patch(norm).restore()
    other = shallow(norm)
    other.eps = 0.5
    assert torch.equal(other(x), Norm.forward(other, x))
    report = tigon.patch(norm)
    other = shallow(norm)
    assert tigon.patch(other)
    other.eps = 0.5
    assert vars(other)["forward"].__self__ is other
    assert vars(norm)["forward"].__self__ is norm
    torch.testing.assert_close(other(x), Norm.forward(other, x))
    torch.testing.assert_close(norm(x), Norm.forward(norm, x))
    report.restore()
    assert vars(other)["forward"].recipe is not None


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["the module", "a child"])
def test_scripting_a_patched_module_raises_an_error_that_names_the_remedy(wrap):
    model, x = wrap(Scripted()), torch.randn(4, 48)
    report = tigon.patch(model)
    assert report
    with pytest.raises(AttributeError, match=r"call report\.restore\(\) first"):
        torch.jit.script(model)
    report.restore()
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
