"""The cases of a sweep are lines in a picture; other cases are not drawn."""

import pytest

from benchmarks import figures
from benchmarks.ops import report
from benchmarks.ops.runner import BenchRow


def row(shape, provider="tigon", op="rms_norm", model="sweep", extra="", **more):
    case = "/".join([op, model, "x".join(map(str, shape)), *([extra] if extra else [])])
    more = {"kernel_ms": 1.0, "floor_ms": 0.9, "percent_of_roofline": 90.0, "peak_mib": float(shape[-1])} | more
    return BenchRow(case, op, op, model, shape, "bfloat16", provider, **more)


@pytest.fixture
def drawn(monkeypatch):
    """Return the list of the figures that the test draws."""
    figures_of_test = []

    def new_figure(*size):
        figures_of_test.append(original(*size))
        return figures_of_test[-1]

    original = figures.new_figure
    monkeypatch.setattr(figures, "new_figure", new_figure)
    return figures_of_test


def test_a_sweep_is_drawn_as_lines_of_each_provider(tmp_path, drawn):
    rows = [row((4096, n), p) for n in (8192, 1024, 2048) for p in ("tigon", "tigon@HEAD", "liger")]
    rows += [row((4096, n), "cce", accurate=False) for n in (1024, 2048, 8192)]
    rows += [row((64, 512), model="llama"), row((64, 512), "eager", model="llama", status="missing")]
    files = report.plot(rows, tmp_path, "Some GPU")
    assert [file.name for file in files] == ["rms_norm.png"]
    assert files[0].stat().st_size > 10_000
    (figure,) = drawn
    speed, memory = figure.axes
    assert (speed.get_title("left"), speed.get_xlabel()) == ("rms_norm, M = 4096: % of the roofline", "N")
    assert [line.get_label() for line in memory.lines] == ["tigon", "tigon@HEAD", "liger", "cce (inaccurate)"]
    assert list(memory.lines[0].get_xdata()) == [1024, 2048, 8192]
    assert list(memory.lines[0].get_ydata()) == [1024.0, 2048.0, 8192.0]
    assert [90.0] * 3 in [list(line.get_ydata()) for line in speed.lines]
    # The dashed line is the roofline.
    assert list(speed.lines[0].get_ydata()) == [100, 100]
    assert speed.get_ylim()[0] == 0


def test_other_options_are_another_sweep_and_memory_far_apart_is_logarithmic(tmp_path, drawn):
    rows = [row((4096, n), extra=extra) for extra in ("", "offset=1.0") for n in (1024, 2048)]
    rows += [row((4096, n), "eager", peak_mib=100.0 * n) for n in (1024, 2048)]
    report.plot(rows, tmp_path, "Some GPU")
    assert len(drawn[0].axes) == 4
    assert drawn[0].axes[1].get_yscale() == "log"
    assert report.plot([row((4, 4))], tmp_path, "Some GPU") == []
