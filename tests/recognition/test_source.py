"""Forwards are rewritten only from the source of the loaded code, and only where the results cannot differ."""

import copy
import functools
import importlib
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import tigon
from recognition.modules import Norm
from tigon.recognition.rewriting.source import innermost

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")

FILE = """
import torch
from torch import nn

SCALE = 2.0

class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(n)), 1e-6

    def forward(self, x):
        d = x.dtype
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(d)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.post, self.a, self.b, self.flag = Norm(16), Norm(16), nn.Linear(16, 16), nn.Linear(16, 16), True

    def forward(self, x, scale=1.0):
        residual = x
        x = self.norm(x)
        if self.flag and scale is not None:
            x = self.a(x) * 0.5
        x = residual + x
        return self.post(x)
"""
NUMBERS = itertools.count()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the file of a Python module and imports it under a new name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> tuple[types.ModuleType, Path]:
        file = tmp_path / f"edited_{next(NUMBERS)}.py"
        file.write_text(source)
        return importlib.import_module(file.stem), file

    return write


EDITS = {
    "a condition": ("if self.flag and", "if not self.flag and"),
    "and": ("self.flag and scale", "self.flag or scale"),
    "is": ("scale is not None", "scale is None"),
    "another norm": ("self.norm(x)", "self.post(x)"),
    "another layer": ("self.a(x)", "self.b(x)"),
    "a constant": ("* 0.5", "* 0.25"),
    "an operator": ("residual + x", "residual - x"),
    "the order": ("residual + x", "x + residual"),
    "a call": ("return self.post(x)", "return self.post(self.post(x))"),
    "an attribute": ("self.flag and", "self.training and"),
    "a default": ("scale=1.0):\n        residual = x", "scale=None):\n        residual = x.clone()"),
    "a line above": ("SCALE = 2.0", "SCALE = 2.0\n\n"),
    "a syntax error": ("return self.post(x)", "return self.post(x"),
}


@pytest.mark.parametrize(("old", "new"), EDITS.values(), ids=EDITS)
def test_a_file_that_was_edited_after_its_import_changes_nothing(write, old, new):
    module, file = write(FILE)
    ours = module.Layer()
    stock, x = copy.deepcopy(ours), torch.randn(3, 16)
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    report = tigon.patch(ours)
    assert torch.equal(ours(x), stock(x))
    (entry,) = (entry for entry in report.left_alone if entry.part == "fused_statements")
    assert entry.detail.startswith("its forward was changed in its file since it was imported")


# The call of a module that is imported compiles to other code than the call of another global.
IMPORT_BETWEEN_CLASSES = FILE.replace("class Layer", "import math\n\nclass Layer").replace("* 0.5", "* math.sqrt(0.25)")


@pytest.mark.parametrize("source", [FILE, IMPORT_BETWEEN_CLASSES], ids=["imports at the top", "an import in between"])
def test_a_file_that_was_not_edited_is_used(write, source):
    module, _ = write(source)
    ours = module.Layer()
    stock, x = copy.deepcopy(ours), torch.randn(3, 16)
    assert {entry.part for entry in tigon.patch(ours).replaced} == {"rms_norm", "fused_statements"}
    torch.testing.assert_close(ours(x), stock(x))


class Wrapping(nn.Module):
    """Wraps the forward of each subclass, as transformers wraps the forward of decoder layers."""

    calls = 0

    def __init_subclass__(cls):
        forward = cls.forward

        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            is_outermost = type(self).forward is wrapper
            Wrapping.calls += is_outermost
            return forward(self, *args, **kwargs)

        cls.forward = wrapper


class Wrapped(Wrapping):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.__hidden = Norm(16), nn.Linear(16, 16), 1.0

    def forward(self, x):
        residual = x
        x = self.norm(x)
        return residual + self.a(x) * self.__hidden


def twice(function):
    @functools.wraps(function)
    def call(self, x):
        return function(self, function(self, x))

    return call


def without_wraps(function):
    return lambda self, x: function(self, x)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = Norm(16), nn.Linear(16, 16)

    @twice
    @torch.no_grad()
    def forward(self, x):
        residual = x
        x = self.norm(x)
        return residual + self.a(x)


class Hidden(Decorated):
    @without_wraps
    def forward(self, x):
        residual = x
        x = self.norm(x)
        return residual + self.a(x)


def test_a_file_that_is_gone_and_a_decorator_without_functools_wraps_are_reported(write):
    module, file = write(FILE)
    file.unlink()
    for layer, reason in (
        (module.Layer(), "its forward has no source that can be read"),
        (Hidden(), "its forward is behind a decorator that does not name the function that it wraps"),
    ):
        assert [e.detail for e in tigon.patch(layer).left_alone if e.part == "fused_statements"] == [reason]


def count_norms_with_residual(monkeypatch) -> list[int]:
    """Return a list that grows whenever the rewritten statements of a norm and its residual run."""
    calls, stock = [], tigon.recognition.rewriting.fused_statements.norm_with_residual
    monkeypatch.setattr(
        tigon.recognition.rewriting.fused_statements,
        "norm_with_residual",
        lambda *args: calls.append(1) or stock(*args),
    )
    return calls


@pytest.mark.parametrize(("cls", "times"), [(Wrapped, 1), (Decorated, 2)])
def test_a_wrapped_forward_is_rewritten_and_the_wrapper_runs(monkeypatch, cls, times):
    calls, ours, x = count_norms_with_residual(monkeypatch), cls(), torch.randn(3, 16)
    stock = copy.deepcopy(ours)
    report = tigon.patch(ours)
    assert "fused_statements" in {entry.part for entry in report.replaced}
    before = Wrapping.calls
    expected = stock(x)
    stock_calls = Wrapping.calls - before
    torch.testing.assert_close(ours(x), expected)
    assert len(calls) == times
    assert Wrapping.calls - before == 2 * stock_calls


def test_a_wrapper_that_is_added_later_runs(monkeypatch):
    """FSDP2 gives a layer a subclass of its class."""
    calls, ours, x = count_norms_with_residual(monkeypatch), Wrapped(), torch.randn(3, 16)
    expected = ours(x)
    tigon.patch(ours)
    ours.__class__ = type("Sharded", (Wrapped,), {})
    assert type(ours).forward is not Wrapped.forward
    assert innermost(type(ours).forward) is innermost(Wrapped.forward)
    torch.testing.assert_close(ours(x), expected)
    assert len(calls) == 1


def test_another_forward_that_is_set_later_runs(monkeypatch):
    calls, ours, x = count_norms_with_residual(monkeypatch), Wrapped(), torch.randn(3, 16)
    tigon.patch(ours)
    ours.__class__ = type("Other", (Wrapped,), {"forward": lambda self, x: 2 * x})
    assert torch.equal(ours(x), 2 * x)
    assert not calls


# Forwards that do more with the residual of a norm, between its first statement and its last one.
LAYER = """
import torch
from torch import nn
from recognition.modules import Norm
from recognition.test_source import double

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.last = Norm(16), nn.Linear(16, 16), None

    def double(self, x):
        x.register_hook(lambda g: 2 * g)
        return x

    def forward(self, x):
        {}
"""
HOOK = "register_hook(lambda g: g * 2)"
OTHERS = {
    "hook": ["residual = x", "y = self.norm(x)", f"residual.{HOOK}", "return y + residual"],
    "hook on an alias": ["residual = x", "y = self.norm(x)", "z = residual", f"z.{HOOK}", "return y + residual"],
    "hook by a method": ["residual = x", "y = self.norm(x)", "return y + self.double(residual)"],
    "hook by a function": ["residual = x", "y = self.norm(x)", "double(residual)", "return y + residual"],
    "identity": ["residual = x", "y = self.norm(x)", "return y + (residual if residual is x else 2 * residual)"],
    "retained": [
        "residual = x", "y = self.norm(x)", "residual.retain_grad()", "self.last = residual", "return y + residual",
    ],
    "in place": ["residual = x", "x = self.norm(x)", "residual += self.a(x)", "return residual"],
    "in place by a method": ["residual = x", "x = self.norm(x)", "residual.add_(self.a(x))", "return residual"],
    "in place in a branch": [
        "residual = x", "x = self.norm(x)", "if self.a.bias is not None:", "    x = self.a(x)", "    residual += x",
        "return residual",
    ],
    "in place by index": ["residual = x", "x = self.norm(x)", "residual[:] = residual + self.a(x)", "return residual"],
    "returned": ["residual = x", "y = self.norm(x)", "return self.a(y), residual"],
    "sum in place": ["x = x + self.a(x)", "residual = x", "y = self.norm(x)", "residual *= 2.0", "return y + residual"],
}  # fmt: skip


def double(x):
    x.register_hook(lambda g: 2 * g)


@pytest.fixture
def make_layer(write):
    """Return make_layer(statements): it builds a layer whose forward has these statements."""
    return lambda statements: write(LAYER.format("\n        ".join(statements)))[0].Layer()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_residual_with_other_uses_has_the_stock_results(make_layer, name, dtype):
    torch.manual_seed(0)
    stock = make_layer(OTHERS[name]).to(dtype)
    ours, upstream = copy.deepcopy(stock), torch.randn(6, 16, dtype=dtype)
    report = tigon.patch(ours)
    entries = [entry for entry in report.entries if entry.part == "fused_statements"]
    assert not any(entry.replaced for entry in entries)
    assert all("its forward does more with the residual of a norm" in entry.detail for entry in entries)
    # A norm whose input is changed in place has no op.
    assert entries or "in place" in name
    results = []
    for layer in (stock, ours):
        x = torch.linspace(-1, 1, 96, dtype=dtype).view(6, 16).requires_grad_()
        try:
            y = layer(1 * x)
            sum((part * upstream).sum() for part in (y if isinstance(y, tuple) else (y,))).backward()
            results.append(x.grad)
        except RuntimeError as error:  # In fp32 the stock norm saves the residual itself.
            assert dtype == torch.float32
            results.append(str(error).split(":")[0])
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        # The eager norm rounds its gradient in another order. If a hook received only a part of the gradient, the error
        # would be much larger than a rounding error.
        atol = (1e-5 if dtype == torch.float32 else 2**-7) * results[0].abs().max().item()
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=atol)


@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith(("in place", "sum in place"))])
def test_a_norm_whose_input_is_overwritten_keeps_its_forward(make_layer, name):
    report = tigon.patch(make_layer(OTHERS[name]))
    (entry,) = (entry for entry in report.entries if entry.part == "rms_norm")
    assert not entry.replaced
    assert entry.detail.startswith("its input is changed in place afterwards (Layer, line ")


PLAIN = {
    "plain": ["residual = x", "x = self.norm(x)", "return residual.to(x.dtype) + self.a(x)"],
    "a write before the norm": ["y = self.a(x)", "y += x", "residual = y", "y = self.norm(y)", "return residual + y"],
}


@pytest.mark.parametrize("statements", PLAIN.values(), ids=PLAIN)
def test_a_residual_without_other_uses_is_rewritten(make_layer, statements):
    assert {entry.part for entry in tigon.patch(make_layer(statements)).replaced} == {"rms_norm", "fused_statements"}
