"""The report of the demo: comparison, tolerance, table, report.json and pictures."""

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.demo.demo_presets import DEMO_PRESETS, warmup_steps
from benchmarks.demo.demo_report import TOLERANCE, compare, plot_loss, plot_speed_memory, print_table, write_report
from benchmarks.demo.demo_runs import DemoRun
from benchmarks.training.job import Job
from benchmarks.training.text import Corpus, Tokens

NAN = float("nan")


def make_run(
    name: str, losses: list[float], seconds: float = 1.0, peak: int = 100 * 2**20, dtype: str = "float32"
) -> DemoRun:
    preset = replace(DEMO_PRESETS["cpu"], steps=10, batch=2, seq=50, dtype=dtype)
    job = Job("stock", {}, "tokens.npy", dtype, "cpu", continues=True)
    run = DemoRun(name, name, "llama", preset, job)
    run.facts = {"parameters": 5, "state_bytes": 1000}
    if losses:
        times = [seconds] * len(losses)
        run.measurement.add({
            "seconds": times, "host_seconds": times, "losses": losses, "allocated": 1000 + peak, "reserved": None
        })  # fmt: skip
    return run


def test_equal_curves_agree():
    comparison = compare(make_run("stock", [3.0, 2.0]), make_run("tigon", [3.0, 2.0]))
    assert comparison.agree
    assert comparison.loss_difference == 0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", [0, 2])
def test_curves_differ_beyond_the_tolerance(dtype, step):
    relative = TOLERANCE[dtype].at(step)
    curve = [4.0, 2.0, 1.0]
    shift = lambda factor: [loss * (1 + factor * relative * (i == step)) for i, loss in enumerate(curve)]
    stock = make_run("stock", curve, dtype=dtype)
    assert compare(stock, make_run("tigon", shift(0.9), dtype=dtype)).agree
    comparison = compare(stock, make_run("tigon", shift(-1.1), dtype=dtype))
    assert not comparison.agree
    assert comparison.worst == comparison.largest == step
    assert comparison.loss_difference == pytest.approx(1.1 * relative)


def test_tolerance_is_tighter_at_the_start():
    """A difference that late steps may have is a fault at the first step, even if late differences are larger."""
    stock = make_run("stock", [2.0] * 100)
    late = TOLERANCE["float32"].at(99)
    second = [2.0] * 100
    second[99] *= 1 + 0.9 * late
    assert compare(stock, make_run("tigon", second)).agree
    second[0] *= 1 + 0.5 * late
    comparison = compare(stock, make_run("tigon", second))
    assert not comparison.agree
    assert (comparison.largest, comparison.worst) == (99, 0)


@pytest.mark.parametrize("losses", [[NAN, 2.0], [3.0, math.inf]], ids=["nan", "inf"])
def test_curves_with_a_loss_that_is_not_finite_differ(losses):
    finite = [3.0, 2.0]
    assert not compare(make_run("stock", finite), make_run("tigon", losses)).agree
    assert not compare(make_run("stock", losses), make_run("tigon", finite)).agree
    assert not compare(make_run("stock", losses), make_run("tigon", losses)).agree


def test_losses_below_one_are_compared_as_if_they_were_one():
    assert compare(make_run("stock", [0.0]), make_run("tigon", [1e-6])).differences == [1e-6]
    assert not compare(make_run("stock", [0.0]), make_run("tigon", [1e-4])).agree


def test_curves_of_different_length_are_compared_over_common_steps():
    assert compare(make_run("stock", [3.0, 2.0, 1.0]), make_run("tigon", [3.0])).differences == [0.0]
    assert compare(make_run("stock", [3.0]), make_run("tigon", [])) is None


def test_comparison_has_the_ratios_of_time_and_memory():
    comparison = compare(make_run("stock", [3.0], 2.0, 200), make_run("tigon", [3.0], 1.0, 50))
    assert comparison.step_time_ratio == 0.5
    assert comparison.peak_memory_ratio == 0.25


def test_median_leaves_out_the_warm_up():
    run = make_run("stock", [1.0] * 8)
    run.measurement.seconds = [9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert warmup_steps(8) == 3
    assert run.measurement.step_seconds == 3.0
    assert run.measurement.tokens_per_second == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    ("stock", "tigon"),
    [([3.0, 2.0], [3.0, 2.0]), ([3.0, 2.0], []), ([], []), ([NAN], [3.0])],
    ids=["whole", "one run", "nothing", "nan"],
)
def test_all_files_are_written_whatever_was_measured(tmp_path, stock, tigon):
    runs = make_run("stock", stock), make_run("tigon", tigon, 0.5, 10 * 2**20)
    comparison = compare(*runs)
    console = Console(width=100)
    with console.capture() as table:
        print_table(console, *runs, comparison)
    assert "nan" not in table.get()
    write_report(
        tmp_path / "report.json",
        runs,
        comparison,
        corpus=Corpus("name", ["text"], is_truncated=False),
        tokens=Tokens(tmp_path, 10, 300, is_cached=False),
        interrupted=False,
    )
    plot_loss(tmp_path / "loss.png", *runs, comparison, "subtitle")
    plot_speed_memory(tmp_path / "speed_memory.png", *runs, "subtitle")

    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert report["runs"]["tigon"]["losses"] == tigon
    assert report["preset"]["batch"] == 2
    assert report["environment"]["torch"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "speed_memory.png"))
    if comparison is not None:
        assert report["comparison"]["agree"] is comparison.agree


def test_table_shows_both_runs_and_their_ratio():
    runs = make_run("stock", [3.0], 2.0), make_run("tigon", [3.0], 1.0, 25 * 2**20)
    console = Console(width=100)
    with console.capture() as capture:
        print_table(console, *runs, compare(*runs))
    lines = capture.get()
    assert "2,000 ms" in lines
    assert "0.50x" in lines
    assert "25 MiB" in lines
    assert "0.25x" in lines
    assert "tolerance" in lines
