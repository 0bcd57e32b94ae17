"""In pictures, three cases that differ in one axis are lines, and other cases are bars."""

import pytest
from matplotlib import pyplot

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
    (sweep,), rest = plots.find_sweeps(by_case(rows))
    assert (sweep.axis, sweep.axis_name, list(sweep.cases)) == (1, "N", [1024, 2048, 8192])
    assert sweep.title == "rms_norm, M = 4096"
    assert [r.provider for r in sweep.cases[1024]] == ["tigon", "liger"]
    assert rest == {}


def test_cases_that_differ_in_more_than_one_axis_are_no_sweep():
    same = [row((4096, 1024)), row((4096, 2048))]
    for third in (
        row((8192, 4096)),
        row((4096, 4096), extra="offset=1.0"),
        row((4096, 4096), op="layer_norm"),
        # This size is there already.
        row((4096, 2048), model="llama"),
    ):
        sweeps, rest = plots.find_sweeps(by_case([*same, third]))
        assert sweeps == []
        assert len(rest) == 3


def test_the_case_of_a_model_is_separate_from_the_sweep_of_its_shape():
    rows = [row((4096, 2048), model="llama"), *(row((4096, n)) for n in (1024, 2048, 4096))]
    (sweep,), rest = plots.find_sweeps(by_case(rows))
    assert [group[0].model for group in sweep.cases.values()] == ["sweep"] * 3
    assert list(rest) == ["rms_norm/llama/4096x2048"]


def test_a_case_of_two_sweeps_belongs_to_the_longer_one():
    rows = [row((4096, n)) for n in (1024, 2048, 4096)] + [row((m, 4096)) for m in (16, 32, 64)]
    (sweep,), rest = plots.find_sweeps(by_case(rows))
    assert (sweep.axis, list(sweep.cases)) == (0, [16, 32, 64, 4096])
    assert len(rest) == 2


@pytest.fixture
def figures(monkeypatch):
    """Return the list of the figures that the test draws. They stay open until its end."""
    figures_of_test = []
    monkeypatch.setattr(pyplot, "close", figures_of_test.append)
    yield figures_of_test
    monkeypatch.undo()
    for figure in figures_of_test:
        pyplot.close(figure)


def test_a_sweep_is_drawn_as_lines_of_each_provider(tmp_path, figures):
    rows = [row((4096, n), p) for n in (1024, 2048, 8192) for p in ("tigon", "tigon@HEAD", "liger", "unheard-of")]
    rows += [row((64, 512), model="llama"), row((64, 512), "eager", model="llama", status="missing")]
    files = plots.draw(rows, tmp_path, "Some GPU")
    assert [file.name for file in files] == ["rms_norm.png"]
    assert files[0].stat().st_size > 10_000
    (figure,) = figures
    speed, memory, bar_time, _ = figure.axes
    assert [line.get_label() for line in memory.lines] == ["tigon", "tigon@HEAD", "liger", "unheard-of"]
    assert list(memory.lines[0].get_xdata()) == [1024, 2048, 8192]
    assert list(memory.lines[0].get_ydata()) == [1024.0, 2048.0, 8192.0]
    assert list(speed.lines[0].get_ydata()) == [90.0] * 3
    # The last line is the roofline.
    assert list(speed.lines[-1].get_ydata()) == [100, 100]
    assert speed.get_ylim()[0] == 0
    assert [text.get_text() for text in bar_time.get_yticklabels()] == ["tigon"]


def test_memory_is_logarithmic_if_providers_are_far_apart(tmp_path, figures):
    sizes = {"tigon": 1.0, "eager": 100.0}
    plots.draw([row((4096, n), p, peak_mib=m) for n in (1, 2, 4) for p, m in sizes.items()], tmp_path, "Some GPU")
    assert figures[0].axes[1].get_yscale() == "log"
    assert plots.draw([row((4, 4), status="error", kernel_ms=None)], tmp_path, "Some GPU") == []


def linear_row(case, provider, ratio, **more):
    shape = tuple(map(int, case.split("/")[2].split("x")))
    more = {"products_ratio": ratio, "peak_above_gradients_mib": 400.0} | more
    return row(shape, provider, op="linear_cross_entropy", model="llama-3-8b", **more)


LLAMA = "linear_cross_entropy/llama-3-8b/8192x4096x128256"
SHORT = "linear_cross_entropy/llama-3-8b/1024x4096x128256"


def test_linear_cases_are_bars_from_the_line_of_the_products(tmp_path, figures):
    rows = [linear_row(LLAMA, "tigon", 1.04), linear_row(LLAMA, "eager", 1.3, accurate=False)]
    rows += [linear_row(LLAMA, "quack", None, status="error", kernel_ms=None), linear_row(LLAMA, "products", 1.0)]
    rows += [linear_row(SHORT, "tigon", 0.98), linear_row(SHORT, "cce", 4.2, peak_above_gradients_mib=-0.5)]
    files = plots.draw(rows, tmp_path, "Some GPU")
    assert [file.name for file in files] == ["linear_cross_entropy.png", "linear_cross_entropy_products.png"]
    left, right = figures[1].axes
    names = [text.get_text() for text in left.get_yticklabels()]
    assert names == ["tigon", "eager (inaccurate)", "tigon", "cce"]
    ends = [round(bar.get_x() + bar.get_width(), 3) for bar in left.patches]
    assert [bar.get_x() for bar in left.patches] == [1.0] * 4
    assert ends == [1.04, 1.3, 0.98, 4.2]
    assert left.get_xscale() == right.get_xscale() == "log"
    assert left.get_xlim()[0] < 0.98
    assert left.get_xlim()[1] > 4.2
    labels = [text.get_text() for text in left.texts]
    assert {"1.04", "1.30", "0.98", "4.20", "llama-3-8b/8192x4096x128256", "llama-3-8b/1024x4096x128256"} == set(labels)
    assert [text.get_text() for text in right.texts] == [" 400 MiB", " 400 MiB", " 400 MiB", " 0 MiB"]
    bar_positions = [bar.get_y() for bar in left.patches]
    # Tigon is first, because the axis points down.
    assert bar_positions == sorted(bar_positions)
    assert left.get_ylim()[0] > left.get_ylim()[1]


def test_other_cases_are_not_drawn_over_the_products(tmp_path, figures):
    rows = [linear_row("linear_cross_entropy/llama-3-8b/4096x4096x128256", "tigon", 1.04)]
    rows += [linear_row(LLAMA, "eager", None)]
    assert [file.name for file in plots.draw(rows, tmp_path, "Some GPU")] == ["linear_cross_entropy.png"]


def test_inaccurate_peers_are_marked(tmp_path, figures):
    rows = [row((4096, n), p, accurate=p == "tigon") for n in (1024, 2048, 4096) for p in ("tigon", "cce")]
    rows += [row((64, 512), p, model="llama", accurate=p == "tigon") for p in ("tigon", "cce")]
    plots.draw(rows, tmp_path, "Some GPU")
    _, memory, bar_time, _ = figures[0].axes
    assert [line.get_label() for line in memory.lines] == ["tigon", "cce (inaccurate)"]
    assert [text.get_text() for text in bar_time.get_yticklabels()] == ["tigon", "cce (inaccurate)"]
