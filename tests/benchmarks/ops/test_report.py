"""The report begins with a summary, and its JSON has all fields."""

import json
from dataclasses import fields

from benchmarks.ops import report
from benchmarks.ops.measure import Roofline
from benchmarks.ops.runner import BenchRow

ROOFLINE = Roofline(bytes_per_second=4e12, flops_per_second=7e14)
MACHINE = {"type": "cuda", "name": "Some GPU"}
SETTINGS = {"rounds": 3}


def row(provider, kernel_ms=None, case="rms_norm/model/16x64", **more):
    op = case.partition("/")[0]
    more = {"bytes": 4096, "kernel_ms": kernel_ms} | more
    return BenchRow(case, op, op, "model", (16, 64), "bfloat16", provider, **more)


ROWS = [
    row("tigon", 0.5, percent_of_roofline=90.4, host_ms=0.1), row("tigon@main", 0.6), row("eager", 5.0),
    row("liger", 1.0, host_ms=0.4), row("quack", 0.75, accurate=False), row("products", 0.1),
    row("cce", status="missing", note="not installed"),
]  # fmt: skip


def summary(rows):
    """Return {title: cell} of the first line."""
    titles, lines, _ = report._summary(rows)
    return dict(zip(titles, lines[0], strict=True))


def test_summary_has_tigon_the_best_peer_liger_and_the_other_revision():
    assert summary(ROWS) == {
        "case": "rms_norm/model/16x64", "tigon ms": "0.5000", "% roofline": "90",
        # The best peer is neither the floor nor another revision of Tigon.
        "best peer": "quack (inaccurate)", "its ms": "0.7500", "speed-up": "1.50x", "liger ms": "1.000",
        "speed-up over liger": "2.00x", "host ms (liger's)": "0.1000 (0.4000)", "tigon@main ms": "0.6000",
        "speed-up over tigon@main": "1.20x",
    }  # fmt: skip


LINEAR = "linear_cross_entropy/model/32x8x64"
ERRORS = {
    "output 0": {"error": 1e-6, "eager_error": 1e-6, "ratio": 1.0},
    "gradient of input": {"error": 2e-3, "eager_error": 2e-3, "ratio": 0.9996},
    "gradient of linear_weight": {"error": 4e-3, "eager_error": 2e-3, "ratio": 1.7321},
}
LINEAR_ROWS = [
    row("tigon", 1.04, LINEAR, bytes=None, flops=10**9, wall_ms=1.05, products_ratio=1.0404, errors=ERRORS,
        peak_mib=1500.0, peak_above_gradients_mib=433.6),
    row("eager", 1.3, LINEAR, bytes=None, flops=10**9, products_ratio=1.3, errors={**ERRORS} | {"output 0": {}}),
    row("products", 1.0, LINEAR, bytes=None, flops=10**9, products_ratio=1.0),
]  # fmt: skip


def table_of(markdown, case):
    """Return {provider: {title: cell}} of the table of a case."""
    lines = markdown[markdown.index(f"### {case}") :].split("\n\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def test_the_table_of_a_case_bound_by_products_compares_it_with_them():
    text = report.markdown(ROWS + LINEAR_ROWS, ROOFLINE, MACHINE, SETTINGS)
    table = table_of(text, LINEAR)
    assert table["tigon"]["wall ms"] == "1.050"
    assert [table[name]["x products"] for name in ("tigon", "eager", "products")] == ["1.040", "1.300", "1.000"]
    assert table["tigon"]["peak MiB above gradients"] == "433.6"
    ratios = [table[name]["error x eager: loss, dX, dW"] for name in ("tigon", "eager", "products")]
    assert ratios == ["1.000, 1.000, 1.732", "-, 1.000, 1.732", "-"]
    assert "x products" not in table_of(text, "rms_norm/model/16x64")["tigon"]
    assert "x products: time divided by" in text
    assert "x products: time divided by" not in report.markdown(ROWS, ROOFLINE, MACHINE, SETTINGS)
    cells = summary(LINEAR_ROWS)
    assert (cells["x products"], cells["peak MiB above gradients"]) == ("1.040", "433.6")
    assert cells["error x eager: loss, dX, dW"] == "1.000, 1.000, 1.732"


def test_markdown_opens_with_the_summary():
    against = {"against": {"provider": "tigon@main", "commit": "0123456789abcdef", "title": "A | B"}}
    second = [row("tigon", 0.2, case="softmax/model/16x64"), row("eager", 0.3, case="softmax/model/16x64")]
    text = report.markdown(ROWS + second, ROOFLINE, MACHINE, SETTINGS | against)
    order = [text.index(part) for part in ("# Ops", "Some GPU", "tigon@main is 0123456789ab", "## Summary")]
    order += [text.index(part) for part in ("| softmax/model/16x64 | 0.2000 |", "## Cases", "### rms_norm/model/16x64")]
    assert order == sorted(order)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table}) == 1


def test_json_holds_every_field_that_its_schema_names(tmp_path):
    file = tmp_path / "bench.json"
    report.write_json(file, ROWS, ROOFLINE, MACHINE, SETTINGS)
    document = json.loads(file.read_text())
    assert list(document) == ["schema", "command", "versions", "machine", "settings", "roofline", "rows"]
    assert len(document["rows"]) == len(ROWS)
    for field in fields(BenchRow):
        assert field.name in document["rows"][0]
