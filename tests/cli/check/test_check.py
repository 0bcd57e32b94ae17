"""`tigon check` finds an op that is wrong, an op that raises and a model that differs, and always writes its file."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tigon
from benchmarks.workloads import WORKLOADS
from command_work import run_tigon
from tigon.cli.check import command, fast_path_checks, model_checks, op_checks, report
from tigon.cli.check.calls import CALLS
from tigon.cli.check.report import CheckOutcome, CheckReport, NotChecked, OpSpeed

pytest.importorskip("typer")
pytestmark = pytest.mark.no_interpreter("The command refuses to run in the interpreter.")
CPU = torch.device("cpu")


@pytest.fixture
def run(monkeypatch):
    """Return a function that calls `tigon check` on the CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda *arguments: run_tigon("check", "--device", "cpu", *arguments)


def outcome_of(function) -> CheckOutcome:
    results = CheckReport("a chip", "cpu")
    results.run(("ops", "a", "b", function))
    return results.outcomes[0]


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


def test_the_command_needs_nothing_of_the_repository():
    """An installed package has no `benchmarks`, so a process that cannot import it runs the checks too."""
    code = (
        "import sys; sys.modules['benchmarks'] = None; from tigon.cli.main import main; "
        "sys.argv = ['tigon', 'check', '--device', 'cpu', '--parts', 'ops', '--ops', 'relu2']; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    sources = [file.read_text("utf-8") for file in Path(tigon.__file__).parent.rglob("*.py")]
    assert not any("import benchmarks" in source or "from benchmarks" in source for source in sources)


def test_every_op_that_the_contract_tests_run_has_a_call():
    assert {name for name, workload in WORKLOADS.items() if workload.test_variants} == {call.op for call in CALLS}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.op)
def test_the_calls_of_an_op_hold_in_float32(call):
    for options in call.options:
        op_checks.compare(call, options, call.small, torch.float32, CPU)
    assert call.medium[call.rows_axis] <= 256


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
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(op_checks, "assert_accurate", interrupt)
    saved = []
    monkeypatch.setattr("tigon.cli.output.write_json", lambda path, document: saved.append(document))
    result = run("--parts", "ops", "--ops", "relu2", "--json", str(tmp_path / "check.json"))
    assert result.exit_code == 130
    assert saved[0]["running"].startswith("ops: relu2 ")
    assert saved[-1]["interrupted"]


def test_checks_are_skipped_when_the_time_is_over(run, monkeypatch):
    monkeypatch.setitem(command.PARTS, "ops", 0.0)
    result = run("--parts", "ops", "--ops", "rms_norm")
    assert "no time left: see --seconds" in " ".join(result.output.split())
    assert result.output.splitlines()[-1].startswith("Nothing was checked on ")


def test_bfloat16_and_the_first_options_come_first():
    checks = op_checks.op_checks(None, CPU, has_kernels=False)
    first = checks[: len(CALLS)]
    assert [check[1] for check in first] == [call.op for call in CALLS]
    assert all(check[2].endswith("bfloat16") for check in first)
    assert len(op_checks.op_checks(["relu2"], CPU, has_kernels=True)) == 4


@pytest.mark.parametrize("level", ["default", "lean"])
def test_a_patched_model_agrees_with_stock(level):
    pytest.importorskip("transformers")
    assert "loss" in model_checks._compare("llama", level, CPU)


def test_a_model_that_differs_from_stock_fails(monkeypatch):
    pytest.importorskip("transformers")
    patch = tigon.patch

    def patch_wrongly(model, **options):
        result = patch(model, **options)
        with torch.no_grad():
            model.model.norm.weight *= 1.0001
        return result

    monkeypatch.setattr(tigon, "patch", patch_wrongly)
    outcome = outcome_of(lambda: model_checks._compare("llama", "default", CPU))
    assert outcome.status == "failed"
    assert "from stock" in outcome.note


def test_models_are_skipped_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    outcomes = [outcome_of(check[3]) for check in model_checks.model_checks(CPU)]
    assert {outcome.status for outcome in outcomes} == {"skipped"}
    assert "pip install '.[hf]' in a checkout of Tigon" in outcomes[0].note


def test_a_fast_path_that_does_not_exist_here_is_skipped_with_its_reason():
    outcomes = {check[1]: outcome_of(check[3]) for check in fast_path_checks.fast_path_checks(CPU)}
    assert outcomes["torch.compile, one graph"].status == "passed", outcomes["torch.compile, one graph"].note
    assert outcomes["direct launches"].status == "skipped"
    assert outcomes["direct launches"].note == "no kernels run on this device"


def test_the_ratio_of_step_and_gpu_time_needs_a_gpu():
    (check,) = (check[3] for check in fast_path_checks.fast_path_checks(CPU) if check[1].startswith("step to GPU time"))
    outcome = outcome_of(check)
    assert (outcome.status, outcome.note) == ("skipped", "needs a GPU")


def test_the_ratio_of_step_and_gpu_time_is_that_of_the_profile(monkeypatch):
    pytest.importorskip("transformers")
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: 500.0))
        for kind in (kinds.CUDA, kinds.CPU, kinds.CUDA)
    ]
    profile = lambda activities: contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(fast_path_checks, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    milliseconds, gpu_milliseconds = fast_path_checks._step_times(CPU)
    assert milliseconds > 0
    # Two kernels of half a millisecond in five steps.
    assert gpu_milliseconds == pytest.approx(0.2)
    with pytest.raises(AssertionError, match="no graph was captured: (.|\n)*on cpu"):
        fast_path_checks._step_times(CPU, graphs=True)
    times = iter([(12.0, 2.0), (1.5, 1.0)])
    monkeypatch.setattr(fast_path_checks, "_step_times", lambda device, **options: next(times))
    note = fast_path_checks._step_to_gpu_time(torch.device("cuda"))
    assert note == "a step takes 12.0 ms, 6.0 times its GPU time; with graphs=True 1.50 ms, 1.5 times"


def test_a_wrong_op_is_not_timed(monkeypatch):
    """Times on a CPU mean nothing, so only the order of the work is tested."""
    monkeypatch.setattr(op_checks, "_milliseconds", lambda call: 1.0)
    call = next(call for call in CALLS if call.op == "relu2")
    speed = op_checks._measure(call, CPU)
    assert (speed.op, speed.ms, speed.bytes) == ("relu2", 1.0, 4 * 2 * 4096 * 14336)
    monkeypatch.setattr(tigon, "relu2", wrong)
    with pytest.raises(AssertionError, match="output 0: at "):
        op_checks._measure(call, CPU)


def test_an_outcome_holds_the_reason():
    def skip():
        raise NotChecked("not here")

    assert outcome_of(skip).note == "not here"
    assert outcome_of(lambda: 1 / 0).note == "ZeroDivisionError: division by zero"
    assert outcome_of(lambda: None).status == "passed"


def test_the_tables_fit_80_columns(capsys):
    console = pytest.importorskip("rich.console").Console(width=140)
    outcome = CheckOutcome("speed", "linear_cross_entropy", "c", "skipped", "a long reason " * 20)
    speed = OpSpeed("linear_cross_entropy", (16384, 4096, 128256), 1234.5, 5000.1, 2**40)
    console.print(report.speed_table([speed]), width=command.WIDTH)
    console.print(report.outcome_table("fast paths", [outcome]), width=command.WIDTH)
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
    results = CheckReport("a chip", "cuda", seconds=3.2)
    results.outcomes = [CheckOutcome("ops", "a", "b", status) for status in statuses]
    assert report.last_line(results) == line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "nothing"), "Invalid value for --ops: must be among rms_norm, "),
        (
            ("--parts", "speeds"),
            "Invalid value for --parts: must be among ops, models, fast-paths, speed, got 'speeds'",
        ),
        (("--seconds", "0"), "Invalid value for '--seconds': "),
        (("--device", "tpu"), "Invalid value for --device: must be auto, cpu, mps, cuda or cuda:N, got 'tpu'"),
        (("--device", "mps"), ", MPS: no), got 'mps'"),
    ],
    ids=["op", "part", "seconds", "device", "no MPS"],
)
def test_a_mistake_is_one_line(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert message in result.output
