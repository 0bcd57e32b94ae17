"""Measurements, the comparison of losses, and the reports of the training benchmark."""

import math
from types import SimpleNamespace

import pytest

from benchmarks.train import report
from benchmarks.train.measurement import Measurement, compare_with_stock
from benchmarks.train.worker import kernel_totals

NAN = math.nan
MACHINE = {"type": "cpu", "name": "a CPU"}
SETTINGS = {"title": "a model", "sweep": None, "interrupted": False, "machine": MACHINE, "applied": {}}


# The other fields of a worker's result.
POINT = {
    "first_seconds": [], "again_seconds": [], "gpu_seconds": None, "kernels": None, "captures": [], "state_bytes": 0,
}  # fmt: skip


def make_row(
    provider: str, seconds: list[float], losses: list[float], status: str = "ok", seq: int = 512, **fields
) -> Measurement:
    row = Measurement(provider, 2, seq, gpus=4, status=status, **fields)
    if seconds:
        row.add(POINT | {
            "seconds": seconds, "host_seconds": [0.01] * len(seconds), "losses": losses, "allocated": 3 * 2**30,
            "reserved": 4 * 2**30,
        })  # fmt: skip
    return row


def test_a_row_is_the_median_of_all_rounds():
    row = make_row("tigon", [0.1, 0.2, 0.4], [3.0, 2.0])
    later = {"seconds": [0.3, 0.5], "host_seconds": [0.1], "losses": [9.0], "allocated": 5 * 2**30, "reserved": None}
    row.add(POINT | later)
    assert row.step_seconds == 0.3
    assert row.tokens_per_second == pytest.approx(2 * 512 * 4 / 0.3)
    assert row.spread == pytest.approx((0.2, 0.4))
    assert (row.losses, row.allocated, row.reserved) == ([3.0, 2.0], 5 * 2**30, 4 * 2**30)
    assert make_row("tigon", [1.0], [], state_bytes=2**30).above_state == 2 * 2**30


def test_losses_agree_if_their_differences_are_those_of_the_noise():
    stock, reversed_stock = (
        make_row("stock", [1.0], [3.0, 2.0, 1.0]), make_row("stock-reversed", [1.0], [3.0, 2.01, 1.0]),
    )  # fmt: skip
    near, far = make_row("tigon", [1.0], [3.0, 2.0, 1.02]), make_row("tigon-lean", [1.0], [3.0, 2.0, 1.06])
    curves = compare_with_stock([reversed_stock, stock, near, far])
    assert {name: curve.agrees for name, curve in curves.items()} == {
        "stock-reversed": True, "tigon": True, "tigon-lean": False,
    }  # fmt: skip
    assert curves["tigon"].largest == pytest.approx(0.02)
    assert curves["tigon"].noise == pytest.approx(0.01)
    # Without the noise there is no verdict.
    assert compare_with_stock([stock, near])["tigon"].agrees is None
    assert compare_with_stock([near]) == {}
    broken = make_row("tigon", [1.0], [3.0, NAN, 1.0])
    assert compare_with_stock([stock, reversed_stock, broken])["tigon"].agrees is False
    assert report.sentence(broken).endswith("  losses that are not finite")
    assert "finite" not in report.sentence(near)


def test_losses_agree_if_they_are_as_near_to_fp32_as_those_of_stock():
    """Stock rounds, so a run that rounds less may be further from stock than the noise."""
    losses = {
        "stock": [3.0, 2.0, 1.0], "stock-reversed": [3.0, 2.0, 1.0], "stock-fp32": [3.0, 2.0, 0.9],
        "tigon": [3.0, 2.0, 0.85], "tigon-lean": [3.0, 2.0, 0.7],
    }  # fmt: skip
    rows = {name: make_row(name, [1.0], values) for name, values in losses.items()}
    curves = compare_with_stock(rows.values())
    assert curves["tigon"].agrees is True
    assert curves["tigon"].error == pytest.approx(0.05 / 3**0.5)
    assert curves["tigon-lean"].agrees is False
    text = report.markdown(list(rows.values()), SETTINGS)
    assert "rms from fp32" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| tigon-lean") and line.endswith("no |")]
    assert "1.2e-01 | 5.8e-02" in line


def test_kernels_are_those_of_a_step_without_annotations():
    from torch.autograd import DeviceType

    def event(on: DeviceType, microseconds: float, is_user_annotation: bool = False) -> SimpleNamespace:
        time_range = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(device_type=on, time_range=time_range, is_user_annotation=is_user_annotation)

    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    events = [event(gpu, 100), event(gpu, 300), event(cpu, 999), event(gpu, 400, is_user_annotation=True)] * 2
    assert kernel_totals(events, 2) == (pytest.approx(4e-4), 2)


def test_tokens_of_padded_texts_are_counted_over_all_steps():
    row = make_row("tigon", [0.1, 0.1, 1.8], [3.0], trained_tokens=600)
    assert row.tokens_per_second == pytest.approx(300)
    row.add({"seconds": [2.0], "losses": [], "allocated": None, "reserved": None, "trained_tokens": 1400})
    assert row.tokens_per_second == pytest.approx(500)


def test_the_report_has_the_time_of_the_gpu_and_uneven_lengths():
    stock = make_row("stock", [0.4], [3.0], first_seconds=[0.8, 0.4], again_seconds=[0.4, 0.2], kernels=9)
    capture = {"signature": "input_ids [2, 512]", "seconds": 1.25}
    graphs = make_row(
        "tigon-graphs", [0.2], [3.0], gpu_seconds=0.16, kernels=812, first_seconds=[0.1, 0.2], again_seconds=[0.1, 0.1],
        captures=[capture, capture],
    )  # fmt: skip
    text = report.markdown([stock, graphs], SETTINGS)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[3][3:7] == ["200.0", "160.0", "1.25", "812"]
    captures = lines[0].index("captures")
    assert (lines[2][captures], lines[3][captures]) == ("-", "2 (2.5 s, 1.25 s)")
    assert ["tigon-graphs", "2", "150.0", "4.00", "100.0", "3.00"] in lines
    assert graphs.as_dict()["mean_first_seconds"] == pytest.approx(0.15)
    assert "Uneven" not in report.markdown([make_row("stock", [0.4], [3.0])], SETTINGS)
