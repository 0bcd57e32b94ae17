"""`benchmarks.ops` runs from the command line, on a CPU and on tiny cases."""

import json

import pytest
import torch
import torch.nn.functional as F
import typer
from typer.testing import CliRunner

from benchmarks.ops import cases, measure, providers, runner
from benchmarks.ops.providers import Provider
from benchmarks.ops.session import bench
from benchmarks.workloads import Case
from tigon.cli import main as cli

TINY = (
    Case("tiny", (16, 64), ("small",), op="rms_norm"), Case("tiny", (32, 512), ("small",), op="cross_entropy"),
    Case("tiny", (32, 64, 512), ("small", "linear"), op="linear_cross_entropy"),
    Case("tiny", (32, 64, 512), ("small", "linear"), op="linear_cross_entropy", no_grad=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_roofline(monkeypatch):
    monkeypatch.setattr(cases, "CASES", TINY)
    monkeypatch.setattr("benchmarks.ops.measure.median_seconds", lambda call: 1e-3)
    init = measure.Meter.__init__

    def init_small(meter, device):
        init(meter, device)
        meter.copy_bytes, meter.matmul_size = 2**16, 64

    monkeypatch.setattr(measure.Meter, "__init__", init_small)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the command and returns its exit code, its output, and the report or None."""

    def call(*arguments):
        application = typer.Typer()
        application.command()(bench)
        result = CliRunner().invoke(application, ["--device", "cpu", "--out", str(tmp_path / "out"), *arguments])
        report = tmp_path / "out" / "bench.json"
        return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else None

    return call


def rows_of(report, **match):
    return [row for row in report["rows"] if all(row[key] == value for key, value in match.items())]


def replace(monkeypatch, op, *rows):
    monkeypatch.setitem(providers.PROVIDERS, op, rows)


def test_a_run_writes_json_and_markdown(run, tmp_path, monkeypatch):
    # A CPU has no measurement of memory.
    monkeypatch.setattr("benchmarks.ops.measure.Meter.peak_bytes", lambda meter, bound: 3 * 2**20)
    code, output, report = run("--providers=-compile", "--quick")
    assert code == 0, output
    out = tmp_path / "out"
    names = {file.name for file in out.iterdir()}
    assert names == {"bench.json", "bench.md"}
    assert output.index("Summary") < output.index("Report in")

    assert report["schema"] == 2
    assert (report["machine"]["type"], report["machine"]["runs_kernels"]) == ("cpu", False)
    says_references = "no kernels run here: the rows of Tigon measure its references in torch"
    assert says_references in report["machine"]["name"]
    assert says_references in " ".join(output.split())
    assert says_references in (out / "bench.md").read_text()
    assert report["versions"]["torch"] == torch.__version__
    assert report["roofline"]["bytes_per_second"] > 0
    tigon_rows = rows_of(report, provider="tigon")
    assert [row["case"] for row in tigon_rows] == [case.name for case in TINY]
    for row in tigon_rows:
        assert row["status"] == "ok"
        assert row["wall_ms"] > 0
        assert row["peak_mib"] == 3
        # A CPU has no kernels.
        assert row["kernel_ms"] is None
        assert row["percent_of_roofline"] == pytest.approx(100 * row["floor_ms"] / row["wall_ms"])
        assert row["error"] <= 2 * row["eager_error"] + 0.02
        assert len(row["samples"]["wall"]) >= 1
    floors = {row["case"]: row for row in rows_of(report, provider="products")}
    for floor in floors.values():
        assert (floor["status"], floor["error"], floor["errors"], floor["products_ratio"]) == ("ok", None, {}, 1.0)
    for row in rows_of(report, op="linear_cross_entropy", status="ok"):
        assert row["products_ratio"] == row["wall_ms"] / floors[row["case"]]["wall_ms"]
        gradients = 0 if row["case"].endswith("no_grad") else (32 + 512) * 64 * 2 / 2**20
        assert row["peak_above_gradients_mib"] == pytest.approx(row["peak_mib"] - gradients)
    (ours,) = rows_of(report, provider="tigon", case="linear_cross_entropy/tiny/32x64x512")
    assert list(ours["errors"]) == ["output 0", "gradient of input", "gradient of linear_weight"]
    assert all(errors["ratio"] < 2 for errors in ours["errors"].values())
    (loss_only,) = rows_of(report, provider="tigon", case="linear_cross_entropy/tiny/32x64x512/no_grad")
    assert list(loss_only["errors"]) == ["output 0"]
    assert loss_only["flops"] == ours["flops"] / 3
    (norm,) = rows_of(report, provider="tigon", op="rms_norm")
    assert norm["products_ratio"] is norm["peak_above_gradients_mib"] is None

    markdown = (out / "bench.md").read_text()
    assert "### rms_norm/tiny/16x64 (M x N, bfloat16): floor" in markdown
    assert markdown.index("## Summary") < markdown.index("| rms_norm/tiny/16x64 | ") < markdown.index("## Cases")
    assert "| tigon | " in markdown
    assert "| liger | - | - | - | - | missing: needs a GPU |" in markdown


def test_a_wrong_tigon_kernel_is_not_timed(run, monkeypatch):
    wrong = lambda case: lambda x, weight: (F.rms_norm(x, weight.shape, weight) * 1.5,)
    replace(monkeypatch, "rms_norm", Provider("tigon", wrong), Provider("peer", wrong))
    code, output, report = run("--ops", "rms_norm", "--quick")
    assert code == 1
    assert "rms_norm/tiny/16x64: tigon: wrong: not timed: output 0" in " ".join(output.split())
    (tigon,), (peer,) = rows_of(report, provider="tigon"), rows_of(report, provider="peer")
    assert (tigon["status"], tigon["wall_ms"], tigon["samples"]) == ("wrong", None, {})
    # A wrong peer is timed, and its row says that it is wrong.
    assert peer["status"] == "ok"
    assert peer["wall_ms"] > 0
    assert "inaccurate: output 0" in peer["note"]


def test_a_provider_that_is_missing_or_raises_is_a_row(run, monkeypatch):
    def missing(case):
        import no_such_package_at_all  # noqa: F401

    def raising(case):
        return lambda *tensors: torch.zeros(2) @ torch.zeros(3)

    def refuse(case):
        raise providers.Unsupported("not this one")

    good = providers.PROVIDERS["rms_norm"][:2]
    peers = Provider("a", missing), Provider("b", raising), Provider("c", refuse)
    replace(monkeypatch, "rms_norm", *good, *peers)
    code, output, report = run("--ops", "rms_norm", "--quick")
    assert code == 0, output
    status = {row["provider"]: (row["status"], row["note"]) for row in report["rows"]}
    assert status["tigon"][0] == status["eager"][0] == "ok"
    assert status["a"] == ("missing", "not installed (No module named 'no_such_package_at_all')")
    assert status["b"][0] == "error"
    assert status["b"][1].startswith("RuntimeError: ")
    assert status["c"] == ("unsupported", "not this one")
    assert "missing: not installed" in output


def test_an_error_of_tigon_fails_the_run(run, monkeypatch):
    def raising(case):
        return lambda *tensors: 1 / 0

    replace(monkeypatch, "rms_norm", Provider("tigon", raising), providers.PROVIDERS["rms_norm"][1])
    code, _, report = run("--ops", "rms_norm", "--quick")
    assert code == 1
    assert rows_of(report, provider="tigon")[0]["status"] == "error"
    assert rows_of(report, provider="eager")[0]["status"] == "ok"


def test_a_check_that_does_not_fit_uses_fewer_rows(run, monkeypatch):
    def fits(case, inputs, exact=runner.exact_results):
        if case.shape[0] > 4:
            raise torch.OutOfMemoryError
        return exact(case, inputs)

    monkeypatch.setattr(runner, "exact_results", fits)
    code, _, report = run("--ops", "rms_norm", "--providers", "tigon", "--quick")
    assert code == 0
    assert report["rows"][0]["note"] == "checked at 4x64"


def test_ctrl_c_writes_the_cases_that_were_measured(run, monkeypatch):
    from benchmarks.ops import session

    finished_cases = []

    def interrupt(case, *arguments, run_case=session.run_case):
        if finished_cases:
            raise KeyboardInterrupt
        finished_cases.append(case)
        return run_case(case, *arguments)

    monkeypatch.setattr(session, "run_case", interrupt)
    code, output, report = run("--providers", "tigon", "--quick")
    assert code == cli.INTERRUPTED
    assert "Interrupted" in output
    assert report["settings"]["interrupted"] is True
    assert [row["case"] for row in report["rows"]] == [TINY[0].name]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--ops", "sofmax"], "bench: ops must be among"),
    (["--against", "no-such-ref"], "bench: --against must name a commit of"),
    (["--against", "--quick"], "--against"), (["--cases", "nowhere"], "bench: cases must match"),
    (["--providers", "liga"], "bench: providers must be among"),
    (["--ops", "rms_norm", "--providers", "cce"], "bench: none of the ops chosen has a provider among 'cce'"),
    (["--device", "tpu"], "--device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    (["--out", __file__], "--out: must be a folder that can be written, got"), (["--rounds", "0"], "--rounds"),
])  # fmt: skip
def test_bad_options_are_refused_before_anything_is_written(run, arguments, message):
    code, output, report = run(*arguments)
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())
    assert report is None


def test_a_provider_that_overwrites_the_shared_inputs_is_refused(run, monkeypatch):
    tigon, eager = providers.PROVIDERS["rms_norm"][:2]

    def load(case):
        norm = eager.load(case)

        def overwriting(x, weight):
            y = norm(x.clone(), weight)
            with torch.no_grad():
                x.mul_(2)
            return y

        return overwriting

    replace(monkeypatch, "rms_norm", tigon, Provider("a", load), Provider("b", load, overwrites=("x",)), eager)
    code, _, report = run("--ops", "rms_norm", "--quick")
    assert code == 0
    status = {row["provider"]: row["status"] for row in report["rows"]}
    assert status == {"tigon": "ok", "a": "error", "b": "ok", "eager": "ok"}
    (row,) = rows_of(report, provider="a")
    assert (row["note"], row["wall_ms"]) == ("not timed: writes over its inputs: x", None)
    # The overwritten inputs have been replaced.
    assert rows_of(report, provider="eager")[0]["accurate"]

    replace(monkeypatch, "rms_norm", Provider("tigon", load), eager)
    code, _, report = run("--ops", "rms_norm", "--quick")
    assert code == 1
    assert rows_of(report, provider="tigon")[0]["status"] == "wrong"


def test_the_compiler_forgets_its_graphs():
    compiled = []

    @torch.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    def run(x):
        return x * 3

    for count in (1, 2):
        run(torch.ones(2))
        run(torch.ones(2))
        assert len(compiled) == count
        runner._reset_compiler()
