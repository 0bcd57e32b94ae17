"""`benchmarks.train` from the command line on a CPU, with workers in this process, and with processes."""

import json
import os
import signal
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from typer import testing

import tigon
from benchmarks.__main__ import app
from benchmarks.train import command, plan, process, worker
from benchmarks.train.cases import use_case
from benchmarks.train.text import Corpus
from graphs.emulation import emulate
from tigon.cli.main import INTERRUPTED

CORPUS = Corpus("functions", [f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(400)])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder of the tokens, which are computed once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(cache, tmp_path, monkeypatch):
    """Return a function that calls the command and returns its exit code, its output, and its report or None."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(plan, "read_text", lambda: CORPUS)
    fixed = ("--model", "tiny", "--warmup", "1", "--device", "cpu", "--out", str(tmp_path / "out"))

    def call(*arguments, command="train"):
        result = testing.CliRunner().invoke(app(), [command, *fixed, *arguments])
        report = tmp_path / "out" / "train.json"
        return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else None

    return call


@pytest.fixture
def in_process(monkeypatch):
    """Replace processes by calls; return the list of all results."""
    results = []
    threads = torch.get_num_threads()

    def run_process(job, log, source=""):
        results.append(process.run_job(worker.train_job, job, 0))
        return results[-1]

    monkeypatch.setattr(command, "run_process", run_process)
    # At sizes as small as these, several threads would wait for each other.
    torch.set_num_threads(1)
    yield results
    torch.set_num_threads(threads)


def call_before_each_step(monkeypatch, act):
    """Let workers call `act(job, ids)` before each step."""
    step = worker.Trainer.step

    def act_and_step(self, ids):
        act(self.job, ids)
        return step(self, ids)

    monkeypatch.setattr(worker.Trainer, "step", act_and_step)


def rows_of(report, provider):
    return [row for row in report["rows"] if row["provider"] == provider]


def test_the_demo_compares_losses_and_writes_all_files(run, in_process, tmp_path):
    names = "stock,tigon,tigon-lean,liger"
    options = ("--batch", "2", "--seq", "48", "--steps", "8", "--lr=3e-3")
    code, output, report = run("--providers", names, *options, command="demo")
    assert code == 0, output
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {
        "config.json", "train.json", "train.md", "speed_memory.png", "loss.png",
    }  # fmt: skip
    assert report["settings"]["case"] == "demo"
    assert report["settings"]["parameters"] == report["settings"]["parameters_of_a_rank"] > 100_000
    assert "rms_norm" in report["settings"]["applied"]["tigon"]
    for name in ("stock", "stock-reversed", "tigon", "tigon-lean"):
        (row,) = rows_of(report, name)
        assert (row["status"], len(row["losses"]), len(row["samples"]["seconds"])) == ("ok", 9, 8)
        # The model learns.
        assert row["losses"][-1] < row["losses"][0] - 0.2
        assert row["tokens_per_second"] == pytest.approx(96 / row["step_seconds"])
        assert row["allocated"] > 2**20
    assert rows_of(report, "tigon")[0]["losses"] == rows_of(report, "tigon-lean")[0]["losses"]
    assert rows_of(report, "stock")[0]["losses"] != rows_of(report, "stock-reversed")[0]["losses"]
    assert rows_of(report, "liger")[0]["note"] == "needs a GPU"
    assert report["curves"]["tigon"]["agrees"] is True
    assert report["curves"]["tigon"]["largest"] < 1e-4
    markdown = (out / "train.md").read_text()
    assert "## Losses against stock's" in markdown
    assert "| liger | 2 | 48 | - |" in markdown
    for part in ("tokens/s", "peak GiB", "largest difference", str(out)):
        assert part in output
    # A GPU trains a larger model.
    context = SimpleNamespace(params={"device": "cuda"})
    use_case(context, "demo")
    assert (context.default_map["model"], context.default_map["curves"]) == ("Llama-3.2-1B", True)


@pytest.mark.thorough
def test_losses_outside_of_the_noise_fail_the_command(run, in_process, monkeypatch):
    def zero_half_of_the_tokens(job, ids):
        if job.provider == "tigon":
            ids[:, 24:] = 0

    call_before_each_step(monkeypatch, zero_half_of_the_tokens)
    code, _, report = run("--providers", "stock,tigon", "--batch", "2", "--seq", "48", "--steps", "2", "--curves")
    assert code == 1
    assert report["curves"]["tigon"]["agrees"] is False
    assert report["curves"]["stock-reversed"]["agrees"] is True


def test_a_case_trains_uneven_lengths_twice_and_counts_captures_separately(run, in_process, monkeypatch):
    patch, lengths = tigon.patch, {}

    def patch_with_graphs(model, graphs=False, **options):
        report = patch(model, **options)
        report.graphs = SimpleNamespace(captured=[], eager={})
        return report

    def capture_at_the_third_use(job, ids):
        seen = lengths.setdefault(job.provider, [])
        seen.append(ids.shape[1])
        if job.provider == "tigon-graphs" and len(seen) == 5:
            (report,) = reports
            report.graphs.captured.append(SimpleNamespace(signature="ids [1, 24]", seconds=100.0))

    reports = []
    monkeypatch.setattr(tigon, "patch", lambda *a, **k: reports.append(patch_with_graphs(*a, **k)) or reports[-1])
    monkeypatch.setattr(plan, "LENGTH_COUNT", 4)
    call_before_each_step(monkeypatch, capture_at_the_third_use)
    options = ("--case", "llama-1b", "--seq", "32", "--lengths", "8-32", "--steps", "2", "--layers", "1")
    code, output, report = run("--providers", "stock,tigon-graphs", *options)
    assert code == 0, output
    # The options of the case are defaults: the test's own model, number of steps and text replace them.
    assert (report["settings"]["case"], report["settings"]["model"]) == ("llama-1b", "tiny")
    assert (report["settings"]["batch"], report["settings"]["warmup"], report["settings"]["seq"]) == (1, 1, 32)
    uneven = lengths["stock"][3:7]
    assert lengths["stock"] == lengths["tigon-graphs"] == [32] * 3 + uneven * 2
    assert len(set(uneven)) == 4
    stock, graphs = report["rows"]
    assert stock["losses"] == pytest.approx(graphs["losses"], rel=1e-5)
    assert len(stock["losses"]) == 11
    assert [len(row["samples"][name]) for row in (stock, graphs) for name in ("first_seconds", "again_seconds")] == [
        4
    ] * 4
    assert graphs["captures"] == [{"signature": "ids [1, 24]", "seconds": 100.0}]
    # The 100 s of the stub are not in the time of the step in which it captures.
    assert graphs["samples"]["first_seconds"][1] == pytest.approx(-100.0, abs=10)
    assert min(stock["samples"]["first_seconds"]) > 0
    assert "Uneven lengths" in output


@pytest.fixture
def trl_state(monkeypatch):
    """Skip the test without TRL; switch Tigon's losses in TRL off after it, and forget the state of accelerate."""
    pytest.importorskip("trl")
    accelerate = pytest.importorskip("accelerate")
    yield
    tigon.integrations.trl.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory")
def test_trl_trains_uneven_texts_with_the_losses_of_stock(run, in_process, trl_state, monkeypatch, tmp_path):
    lines = [f"    {name} = {name} * {name} + 1\n" for name in ("first", "second", "third", "fourth", "fifth")]
    functions = [f"def f{i}(x):\n{''.join(lines[: 2 + i % 4] * 4)}" for i in range(60)]
    monkeypatch.setattr(plan, "read_text", lambda: Corpus("functions", ["\n".join(functions)]))
    options = ("--case", "trl", "--seq", "80", "--steps", "5", "--lora", "4")
    emulate(monkeypatch)
    code, output, report = run("--providers", "stock,tigon-graphs", *options)
    assert code == 0, output
    stock, noise, patched = report["rows"]
    assert (stock["provider"], noise["provider"], patched["provider"]) == ("stock", "stock-reversed", "tigon-graphs")
    assert len(stock["losses"]) == 6
    assert len(stock["samples"]["seconds"]) == len(stock["samples"]["host_seconds"]) == 5
    assert patched["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert report["curves"]["tigon-graphs"]["agrees"] is True
    assert stock["captures"] == []
    assert patched["captures"]
    # Two texts a step, of 32 to 80 tokens each.
    assert 5 * 2 * 32 <= stock["trained_tokens"] == patched["trained_tokens"] <= 5 * 2 * 80
    assert stock["tokens_per_second"] == pytest.approx(stock["trained_tokens"] / sum(stock["samples"]["seconds"]))
    applied = report["settings"]["applied"]["tigon-graphs"]
    assert "linear_cross_entropy" in applied
    assert f"graphs: {len(patched['captures'])} captured in " in applied
    assert (tmp_path / "out" / "loss.png").exists()


def test_an_unknown_case_is_refused(run):
    code, output, _ = run("--case", "llama-2b")
    assert code == 2
    assert "must be one of demo, llama-1b, llama-8b-lora, qwen-4b-lora, trl" in " ".join(
        output.replace("│", " ").split()
    )


@pytest.mark.thorough
def test_a_sweep_goes_on_after_a_size_that_does_not_fit(run, in_process, monkeypatch):
    def run_out_of_memory(job, ids):
        if job.provider == "stock" and ids.shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    call_before_each_step(monkeypatch, run_out_of_memory)
    sweep = ("--sweep", "seq", "--sizes", "16,64", "--resolution", "32", "--steps", "2", "--rounds", "2")
    code, output, report = run("--providers", "stock,tigon", *sweep)
    assert code == 0, output
    sizes = {name: [(row["seq"], row["status"]) for row in rows_of(report, name)] for name in ("stock", "tigon")}
    assert sizes["stock"] == [(16, "ok"), (64, "out of memory"), (32, "ok")]
    assert sizes["tigon"] == [(16, "ok"), (64, "ok")]
    assert all(len(row["samples"]["seconds"]) == 4 for row in report["rows"] if row["status"] == "ok")
    assert "stock" in output.split("out of memory")[0]


def test_a_provider_that_raises_is_a_row_and_fails_the_command_if_it_is_tigon(run, in_process, monkeypatch):
    def fail(job, ids):
        raise RuntimeError(f"not with {job.provider}")

    call_before_each_step(monkeypatch, fail)
    for provider, code in (("stock", 0), ("tigon", 1)):
        exit_code, _, report = run("--providers", provider, "--seq", "16", "--sweep", "seq")
        assert exit_code == code
        assert [row["status"] for row in report["rows"]] == ["error"]
        assert f"not with {provider}" in report["rows"][0]["note"]


def press_ctrl_c():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    # The signal interrupts the sleep.
    time.sleep(10)


@pytest.mark.parametrize("end", [press_ctrl_c, terminate])
@pytest.mark.sampled(2)
def test_an_interrupted_command_keeps_its_measurements(run, in_process, monkeypatch, tmp_path, end):
    def end_after_the_first_run(job, ids):
        if in_process:
            end()

    call_before_each_step(monkeypatch, end_after_the_first_run)
    code, _, report = run("--providers", "stock,tigon", "--seq", "16", "--steps", "2")
    assert code == INTERRUPTED
    # The command restores the handler of the signal.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert report["settings"]["interrupted"] is True
    assert [row["provider"] for row in report["rows"]] == ["stock"]
    assert (tmp_path / "out" / "speed_memory.png").exists()


def test_a_refused_option_writes_nothing(run):
    code, output, report = run("--providers", "stock,nobody")
    assert code == 2
    assert "got 'nobody'" in " ".join(output.replace("│", " ").split())
    assert report is None


@pytest.mark.thorough
def test_two_ranks_shard_the_model_and_have_the_losses_of_one_process(run, request, tmp_path):
    """Under torchrun and FSDP2 each process has half of the parameters."""
    pytest.importorskip("accelerate")
    fixed = ("--seq", "32", "--steps", "2")
    code, output, report = run("--providers", "tigon-lean", "--batch", "1", "--gpus=2", *fixed)
    logs = [file.read_text() for file in (tmp_path / "out").glob("*.log")]
    assert code == 0, (output, logs)
    # The group ended by itself.
    assert not any("SignalException" in log for log in logs)
    (lean,) = report["rows"]
    assert lean["status"] == "ok", (output, logs)
    assert report["settings"]["parameters_of_a_rank"] == pytest.approx(report["settings"]["parameters"] / 2, rel=0.01)
    request.getfixturevalue("in_process")
    _, _, alone = run("--providers", "stock", "--batch", "2", *fixed)
    (stock,) = alone["rows"]
    assert stock["tokens_per_step"] == lean["tokens_per_step"] == 2 * 32
    assert lean["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert len(lean["losses"]) == 3


JOB = asdict(worker.Job("stock", {"model_type": "llama"}, "absent.npy", 1, 8, device="nowhere"))


@pytest.mark.thorough
def test_a_worker_that_fails_gives_its_reason_and_leaves_its_log(tmp_path):
    result = process.run_process(JOB, tmp_path / "stock.log")
    assert result["status"] == "error"
    assert "nowhere" in result["note"]
    assert "Traceback" in (tmp_path / "stock.log").read_text()


def test_a_process_that_fails_gives_its_last_words(tmp_path):
    program = ["-c", "import sys; print('the last words', file=sys.stderr); sys.exit(5)"]
    result = process.run_process(JOB, tmp_path / "other.log", program)
    assert result == {"status": "error", "note": "the process ended with code 5 the last words"}


def test_an_interrupt_ends_the_process(tmp_path, monkeypatch):
    started = []
    popen = process.subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    def interrupt(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.subprocess, "Popen", start)
    monkeypatch.setattr(process.json, "loads", interrupt)
    program = ["-c", "import os, time; os.write(1, b'\\n'); os.close(1); time.sleep(600)"]
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.1)
    with pytest.raises(KeyboardInterrupt):
        process.run_process({"ranks": 1, "device": "cpu"}, tmp_path / "log", program)
    assert started[0].poll() is not None
    assert not (tmp_path / "log").exists()
