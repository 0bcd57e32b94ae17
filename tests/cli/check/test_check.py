"""`tigon check` finds an op that is wrong, an op that raises and a model that differs, and always writes its file."""

import json

import pytest
import torch

import tigon
from benchmarks.ops.runner import BenchRow
from tigon.cli import main as cli
from tigon.cli.check import check_report, fast_path_checks, model_checks, op_checks, session, speed
from tigon.cli.check.check_report import CheckReport
from tigon.cli.check.outcome import CheckOutcome, Clock, NotChecked, run_check
from tigon.cli.check.speed import OpSpeed

typer_testing = pytest.importorskip("typer.testing")
pytestmark = pytest.mark.no_interpreter("The command refuses to run in the interpreter.")
CPU = torch.device("cpu")


@pytest.fixture
def run(monkeypatch):
    """Return a function that calls `tigon check` on the CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda *arguments: typer_testing.CliRunner().invoke(cli.app(), ["check", "--device", "cpu", *arguments])


def test_all_holds_on_a_cpu(run, tmp_path):
    file = tmp_path / "check.json"
    result = run("--parts", "ops,fast-paths,speed", "--ops", "relu2", "--json", str(file))
    assert result.exit_code == 0, result.output
    # A CPU skips the fast paths of GPUs.
    assert result.output.splitlines()[-1].startswith("All that ran holds on ")
    assert "no table of speed" in result.output
    document = json.loads(file.read_text())
    assert document["failed"] == 0
    assert document["running"] == ""
    assert {outcome["group"] for outcome in document["outcomes"] if outcome["part"] == "ops"} == {"relu2"}
    assert document["environment"]["torch"]
    # The last line has the name of the processor, which may be long.
    assert all(len(line) <= 80 for line in result.output.splitlines()[:-1] if str(file) not in line)


def wrong(x):
    return torch.relu(x).square() * 1.1


def raising(x):
    raise RuntimeError("the compiler\nfailed")


@pytest.mark.parametrize(
    ("function", "message"),
    [(wrong, "output 0: at "), (raising, "RuntimeError: the compiler failed")],
    ids=["wrong", "raises"],
)
def test_an_op_that_fails_ends_the_command_with_1(run, tmp_path, monkeypatch, function, message):
    monkeypatch.setattr(tigon, "relu2", function)
    file = tmp_path / "check.json"
    result = run("--parts", "ops", "--ops", "relu2,tvd", "--json", str(file))
    assert result.exit_code == 1
    line = next(line for line in result.output.splitlines() if line.startswith("FAILED ops: relu2: "))
    assert message in line
    assert result.output.splitlines()[-1].startswith("Something is wrong on ")
    document = json.loads(file.read_text())
    failed = [outcome for outcome in document["outcomes"] if outcome["status"] == "failed"]
    assert {outcome["group"] for outcome in failed} == {"relu2"}
    assert document["failed"] == len(failed) == 3


def test_the_file_names_the_check_that_was_interrupted(run, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(op_checks, "assert_as_accurate_as_eager", interrupt)
    saved = []
    monkeypatch.setattr(session, "write_json", lambda path, document: saved.append(document))
    result = run("--parts", "ops", "--ops", "relu2", "--json", str(tmp_path / "check.json"))
    assert result.exit_code == 130
    assert saved[0]["running"].startswith("ops: relu2 ")
    assert saved[-1]["interrupted"]


def test_checks_are_skipped_when_the_time_is_over():
    checks = op_checks.op_checks(["rms_norm"], runs_kernels=True)
    outcomes = list(op_checks.check_ops(checks, CPU, Clock(0.0), 0.5))
    assert {outcome.status for outcome in outcomes} == {"skipped"}
    assert len(outcomes) == len(checks)


def test_bfloat16_and_the_first_variants_come_first():
    checks = op_checks.op_checks(None, runs_kernels=False)
    ops = list(dict.fromkeys(check.case.workload.name for check in checks))
    first = checks[: len(ops)]
    assert [check.case.workload.name for check in first] == ops
    assert {check.dtype for check in first} == {torch.bfloat16}


@pytest.mark.parametrize("level", ["default", "lean"])
def test_a_patched_model_agrees_with_stock(level):
    pytest.importorskip("transformers")
    assert "loss" in model_checks._compare("llama", level, CPU)


def test_a_model_that_differs_from_stock_fails(monkeypatch):
    pytest.importorskip("transformers")
    patch = tigon.patch

    def patch_wrongly(model, **options):
        report = patch(model, **options)
        with torch.no_grad():
            model.model.norm.weight *= 1.0001
        return report

    monkeypatch.setattr(tigon, "patch", patch_wrongly)
    outcome = run_check("models", "llama", "patched", lambda: model_checks._compare("llama", "default", CPU))
    assert outcome.status == "failed"
    assert "from stock" in outcome.note


def test_models_are_skipped_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    outcomes = list(model_checks.check_models(CPU, Clock(100.0), 1.0))
    assert {outcome.status for outcome in outcomes} == {"skipped"}
    assert "pip install '.[hf]' in a checkout of Tigon" in outcomes[0].note


def test_a_fast_path_that_does_not_exist_here_is_skipped_with_its_reason():
    outcomes = {outcome.name: outcome for outcome in fast_path_checks.check_fast_paths(CPU)}
    assert outcomes["torch.compile, one graph"].status == "passed", outcomes["torch.compile, one graph"].note
    assert outcomes["direct launches"].status == "skipped"
    assert outcomes["direct launches"].note == "no kernels run on this device"


def test_each_op_has_a_case_of_limited_size():
    cases = speed.speed_cases(None)
    assert {case.op for case in cases} >= {"rms_norm", "linear_cross_entropy", "moe_mlp", "lora_linear"}
    assert all((case.bytes or 0) <= speed.MOST_BYTES and (case.flops or 0) <= speed.MOST_FLOPS for case in cases)


def test_the_speed_of_an_op_stands_beside_eager_code():
    """Times on a CPU mean nothing, so only the order of the work is tested, with a small case."""
    cases = [case for case in speed.CASES if case.name in ("relu2/small/512x2048", "tvd/small/256x16384")]
    rooflines = []
    first, second = speed.measure_speed(cases, CPU, Clock(1e9), 1.0, rooflines.append)
    assert [x.outcome.status for x in (first, second)] == ["passed", "passed"]
    assert (first.row.provider, first.eager.provider) == ("tigon", "eager")
    assert first.row.time_ms
    assert rooflines[0].bytes_per_second > 0
    (skipped,) = speed.measure_speed(cases[:1], CPU, Clock(0.0), 0.5, rooflines.append)
    assert skipped.status == "skipped"


def test_an_outcome_holds_the_reason():
    def skip():
        raise NotChecked("not here")

    assert run_check("ops", "a", "b", skip).note == "not here"
    assert run_check("ops", "a", "b", lambda: 1 / 0).note == "ZeroDivisionError: division by zero"
    assert run_check("ops", "a", "b", lambda: None).status == "passed"


def test_the_tables_fit_80_columns(capsys):
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(width=140)
    row = BenchRow(
        case="c", op="linear_cross_entropy", family="f", model="m", shape=(16384, 4096, 128256), dtype="bfloat16",
        provider="tigon", kernel_ms=1234.5, floor_ms=1000.1, percent_of_roofline=81.0,
    )  # fmt: skip
    outcome = CheckOutcome("speed", "linear_cross_entropy", "c", "skipped", "a long reason " * 20)
    console.print(check_report.speed_table([OpSpeed(outcome, row, row)]), width=session.WIDTH)
    console.print(check_report.outcome_table("fast paths", [outcome]), width=session.WIDTH)
    assert all(len(line.rstrip()) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        (["passed", "passed"], "Everything holds on a chip: 2 passed, 0 failed, 0 skipped in 3 s"),
        (["passed", "skipped"], "All that ran holds on a chip: 1 passed, 0 failed, 1 skipped in 3 s"),
        (["passed", "failed"], "Something is wrong on a chip: 1 passed, 1 failed, 0 skipped in 3 s"),
        (["skipped"], "Nothing was checked on a chip: 0 passed, 0 failed, 1 skipped in 3 s"),
    ],
    ids=["all", "skipped", "failed", "nothing"],
)
def test_the_last_line_counts(statuses, line):
    report = CheckReport("a chip", "cuda", seconds=3.2)
    report.outcomes = [CheckOutcome("ops", "a", "b", status) for status in statuses]
    assert check_report.last_line(report) == line


def test_ops_without_a_check_are_named(run):
    result = run("--parts", "ops,speed", "--ops", "dpo_loss")
    assert result.exit_code == 0
    assert "ops: the chosen ops have no check here." in result.output
    assert result.output.splitlines()[-1].startswith("Nothing was checked on ")


def test_an_error_of_the_meter_fails_the_speed_only(monkeypatch):
    def fail(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speed, "make_meter", fail)
    cases = speed.speed_cases(["rms_norm", "rope"])
    outcomes = list(speed.measure_speed(cases, CPU, Clock(100), 1.0, lambda roofline: None))
    assert [(x.group, x.status) for x in outcomes] == [("rms_norm", "failed"), ("rope", "failed")]
    assert all("were not measured: RuntimeError: out of memory" in x.note for x in outcomes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "nothing"), "Invalid value for --ops: must be among rms_norm, "),
        (
            ("--parts", "speeds"),
            "Invalid value for --parts: must be among ops, models, fast-paths, speed, got 'speeds'",
        ),
        (("--seconds", "0"), "Invalid value for '--seconds': "),
        (("--json", "/proc/x"), "Invalid value for --json: must be a file that can be written, got '/proc/x'"),
        (("--device", "tpu"), "Invalid value for --device: must be auto, cpu, mps, cuda or cuda:N, got 'tpu'"),
        (("--device", "mps"), ", MPS: no), got 'mps'"),
    ],
    ids=["op", "part", "seconds", "file", "device", "no MPS"],
)
def test_a_mistake_is_one_line(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert message in result.output
