"""Launchers are plain calls eagerly, and opaque operators under `torch.compile`; both take NamedTuples as arguments."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, library

from tigon.runtime.launch import launcher

pytestmark = pytest.mark.no_interpreter("The test has no kernels.")


class Range(NamedTuple):
    low: float
    high: float | None = None


class Options(NamedTuple):
    scale: float
    bias: Tensor | None
    range: Range
    name: str = ""


class Statistics(NamedTuple):
    total: Tensor
    maximum: Tensor | None


class Results(NamedTuple):
    y: Tensor
    statistics: Statistics


def _fake_scaled(options: Options, x: Tensor) -> Results:
    assert isinstance(options, Options)
    assert isinstance(options.range, Range)
    return Results(torch.empty_like(x), Statistics(x.new_empty(()), x.new_empty(()) if options.name else None))


@launcher(fake=_fake_scaled)
def launcher_test_scaled(x: Tensor, options: Options, weight: Tensor | None) -> Results:
    assert isinstance(options, Options)
    assert isinstance(options.range, Range)
    y = x * options.scale
    if options.bias is not None:
        y = y + options.bias
    if weight is not None:
        y = y * weight
    y = y.clamp(options.range.low, options.range.high)
    return Results(y, Statistics(y.sum(), y.max() if options.name else None))


# A fake function has only the parameters that it needs.
@launcher(fake=lambda x: (torch.empty_like(x), None))
def launcher_test_pair(x: Tensor, ends: Range) -> tuple[Tensor, Tensor]:
    return x.clamp(ends.low, ends.high), None


SCHEMA = (
    "(Tensor x, float options_scale, Tensor? options_bias, float options_range_low, float? options_range_high, "
    "str options_name, Tensor? weight) -> (Tensor, Tensor, Tensor)"
)
CASES = {
    "no optional tensor": (Options(2.0, None, Range(0.0)), None),
    "optional tensors": (Options(0.5, torch.tensor([1.0, 2.0, 3.0]), Range(-1.0, 3.0), "maximum"), torch.ones(3)),
}


def test_operator_schema_has_one_parameter_for_each_field():
    schema = torch.ops.tigon.launcher_test_scaled.default._schema
    assert str(schema).removeprefix("tigon::launcher_test_scaled") == SCHEMA


@pytest.mark.parametrize(("options", "weight"), CASES.values(), ids=CASES)
def test_eager_call_takes_and_returns_named_tuples(options, weight):
    x = torch.tensor([[-1.0, 0.5, 4.0]])
    results = launcher_test_scaled(x, options, weight)
    assert isinstance(results, Results)
    assert isinstance(results.statistics, Statistics)
    assert (results.statistics.maximum is None) == (not options.name)


@pytest.mark.parametrize(("options", "weight"), CASES.values(), ids=CASES)
def test_compiled_call_returns_what_the_eager_call_returns(options, weight):
    def function(x: Tensor, scale: float, bias: Tensor | None) -> Results:
        return launcher_test_scaled(x, options._replace(scale=scale, bias=bias), weight)

    x = torch.tensor([[-1.0, 0.5, 4.0]])
    expected = function(x, options.scale, options.bias)
    results = torch.compile(function, fullgraph=True, backend="aot_eager")(x, options.scale, options.bias)
    assert isinstance(results, Results)
    assert isinstance(results.statistics, Statistics)
    torch.testing.assert_close(results.y, expected.y)
    torch.testing.assert_close(results.statistics.total, expected.statistics.total)
    if expected.statistics.maximum is None:
        assert results.statistics.maximum.numel() == 0, "an empty tensor stands for None"
    else:
        torch.testing.assert_close(results.statistics.maximum, expected.statistics.maximum)


@pytest.mark.parametrize(("options", "weight"), CASES.values(), ids=CASES)
def test_operator_passes_the_checks_of_torch(options, weight):
    flat = (torch.randn(2, 3), options.scale, options.bias, *options.range, options.name, weight)
    library.opcheck(torch.ops.tigon.launcher_test_scaled.default, flat)


def test_plain_tuples_of_results_stay_plain():
    x = torch.tensor([-1.0, 2.0])
    function = torch.compile(lambda x: launcher_test_pair(x, Range(0.0, 1.0)), fullgraph=True, backend="aot_eager")
    (y, nothing), (compiled, empty) = launcher_test_pair(x, Range(0.0, 1.0)), function(x)
    assert y.tolist() == compiled.tolist() == [0.0, 1.0]
    assert nothing is None
    assert empty.numel() == 0


def test_collectives_are_awaited_within_named_tuples(monkeypatch):
    class Promise:
        def trigger_wait(self) -> Tensor:
            return torch.ones(3)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    results = launcher_test_scaled(torch.zeros(1, 3), Options(1.0, Promise(), Range(0.0)), None)
    assert results.y.tolist() == [[1.0, 1.0, 1.0]]


def test_options_and_plain_tensors_need_no_look_for_a_process_group(monkeypatch):
    """The look takes three calls, and small models wait for the host."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: pytest.fail("a process group was looked for"))
    y, _ = launcher_test_pair(torch.tensor([-1.0, 0.0]), Range(0.0, 1.0))
    assert y.tolist() == [0.0, 0.0]
