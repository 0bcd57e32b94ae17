"""One op computes the decay of a linear recurrence, and only that."""

import pytest
import torch
import torch.nn.functional as F

from recognition.test_mixers import _arguments, _gradients, _mixer
from tigon.recognition.parts.mixers import recognise_mixer
from tigon.recognition.rewriting import recurrences

pytestmark = pytest.mark.no_interpreter("It compares functions on the CPU.")
DECAY = "g = -self.taps[:2, 0].float().exp() * F.softplus(g.float() + self.taps[:2, 1])"
# Expressions that compute something else.
OTHERS = {
    "a factor": DECAY.replace("F.softplus", "2 * F.softplus"),
    "no sign": DECAY.replace("-self", "self"),
    "a limit": DECAY.replace(":2, 1])", ":2, 1], threshold=1.0)"),
    "a difference": DECAY.replace("g.float() +", "g.float() -"),
    "half precision": DECAY.replace("g.float()", "g.half()"),
    "another function": DECAY.replace("softplus", "silu"),
}


@pytest.fixture
def decays(monkeypatch) -> list:
    """Return the list to which each call of the op adds its input."""
    recorded, op = [], recurrences.log_decay
    monkeypatch.setattr(recurrences, "log_decay", lambda a, *others: recorded.append(a) or op(a, *others))
    return recorded


def test_the_op_computes_the_decay(decays):
    module = _mixer(statements=DECAY)()
    recipe, inputs = recognise_mixer(module), _arguments()
    stock, ours = (_gradients(module, run, *inputs) for run in (module, lambda *x: recipe(module, *x)))
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert len(decays) == 1
    # A decay of other sizes, or of integers, is computed by the stock expression.
    x, g, beta = inputs
    for other in (g[..., :1].expand_as(g)[:, :, 0, None], g.long()):
        torch.testing.assert_close(recipe(module, x, other, beta), module(x, other, beta), rtol=1e-4, atol=1e-4)
    assert len(decays) == 1


def test_a_function_that_takes_the_place_of_softplus_runs(decays):
    module = _mixer(statements=DECAY)()
    recipe, inputs = recognise_mixer(module), _arguments()
    other = type("Functions", (), {"softplus": staticmethod(lambda x: x.square())})
    scope = type(module).forward.__globals__
    scope["F"] = other
    expected, ours = module(*inputs), recipe(module, *inputs)
    scope["F"] = F
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert not decays


@pytest.mark.parametrize("statement", OTHERS.values(), ids=OTHERS)
def test_other_expressions_stay(statement, decays):
    module = _mixer(statements=statement)()
    recipe, inputs = recognise_mixer(module), _arguments(7)
    torch.testing.assert_close(recipe(module, *inputs), module(*inputs), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not decays
