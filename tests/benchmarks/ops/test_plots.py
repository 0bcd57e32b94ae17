"""In pictures, three cases that differ in one axis are lines; other cases are not drawn."""

import pytest

from benchmarks.ops import plots
from benchmarks.ops.runner import BenchRow


def row(shape, provider="tigon", op="rms_norm", model="sweep", extra="", **more):
    case = "/".join([op, model, "x".join(map(str, shape)), *([extra] if extra else [])])
    more = {"kernel_ms": 1.0, "floor_ms": 0.9, "percent_of_roofline": 90.0, "peak_mib": float(shape[-1])} | more
    return BenchRow(case, op, op, model, shape, "bfloat16", provider, **more)


def by_case(rows):
    cases = {}
    for r in rows:
        cases.setdefault(r.case, []).append(r)
    return cases


def test_three_cases_of_one_axis_are_a_sweep():
    rows = [row((4096, n), p) for n in (8192, 1024, 2048) for p in ("tigon", "liger")]
    (sweep,) = plots.find_sweeps(by_case(rows))
    assert (sweep.axis, sweep.axis_name, list(sweep.cases)) == (1, "N", [1024, 2048, 8192])
    assert sweep.title == "rms_norm, M = 4096"
    assert [r.provider for r in sweep.cases[1024]] == ["tigon", "liger"]


def test_cases_that_differ_in_more_than_one_axis_are_no_sweep():
    same = [row((4096, 1024)), row((4096, 2048))]
    for third in (
        row((8192, 4096)),
        row((4096, 4096), extra="offset=1.0"),
        row((4096, 4096), op="layer_norm"),
        # This size is there already.
        row((4096, 2048), model="llama"),
    ):
        assert plots.find_sweeps(by_case([*same, third])) == []


def test_the_case_of_a_model_is_separate_from_the_sweep_of_its_shape():
    rows = [row((4096, 2048), model="llama"), *(row((4096, n)) for n in (1024, 2048, 4096))]
    (sweep,) = plots.find_sweeps(by_case(rows))
    assert [group[0].model for group in sweep.cases.values()] == ["sweep"] * 3


def test_a_case_of_two_sweeps_belongs_to_the_longer_one():
    rows = [row((4096, n)) for n in (1024, 2048, 4096)] + [row((m, 4096)) for m in (16, 32, 64)]
    (sweep,) = plots.find_sweeps(by_case(rows))
    assert (sweep.axis, list(sweep.cases)) == (0, [16, 32, 64, 4096])


@pytest.fixture
def figures(monkeypatch):
    """Return the list of the figures that the test draws."""
    figures_of_test = []

    def new_figure(*size):
        figures_of_test.append(original(*size))
        return figures_of_test[-1]

    original = plots.new_figure
    monkeypatch.setattr(plots, "new_figure", new_figure)
    return figures_of_test


def test_a_sweep_is_drawn_as_lines_of_each_provider(tmp_path, figures):
    rows = [row((4096, n), p) for n in (1024, 2048, 8192) for p in ("tigon", "tigon@HEAD", "liger")]
    rows += [row((4096, n), "cce", accurate=False) for n in (1024, 2048, 8192)]
    rows += [row((64, 512), model="llama"), row((64, 512), "eager", model="llama", status="missing")]
    files = plots.draw(rows, tmp_path, "Some GPU")
    assert [file.name for file in files] == ["rms_norm.png"]
    assert files[0].stat().st_size > 10_000
    (figure,) = figures
    speed, memory = figure.axes
    assert [line.get_label() for line in memory.lines] == ["tigon", "tigon@HEAD", "liger", "cce (inaccurate)"]
    assert list(memory.lines[0].get_xdata()) == [1024, 2048, 8192]
    assert list(memory.lines[0].get_ydata()) == [1024.0, 2048.0, 8192.0]
    assert list(speed.lines[0].get_ydata()) == [90.0] * 3
    # The last line is the roofline.
    assert list(speed.lines[-1].get_ydata()) == [100, 100]
    assert speed.get_ylim()[0] == 0


def test_memory_is_logarithmic_if_providers_are_far_apart(tmp_path, figures):
    sizes = {"tigon": 1.0, "eager": 100.0}
    plots.draw([row((4096, n), p, peak_mib=m) for n in (1, 2, 4) for p, m in sizes.items()], tmp_path, "Some GPU")
    assert figures[0].axes[1].get_yscale() == "log"
    assert plots.draw([row((4, 4))], tmp_path, "Some GPU") == []
