"""`benchmarks.train` from the command line on a CPU, with workers that are threads, and with processes."""

import functools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer import testing

from benchmarks.__main__ import app
from benchmarks.train import child, worker
from benchmarks.train.answers import is_out_of_memory
from benchmarks.train.child import ChildFailed
from benchmarks.train.job import Job
from tigon.cli.main import INTERRUPTED


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return the file to train on; its tokens are cached in the same folder."""
    file = tmp_path_factory.mktemp("text") / "text.py"
    file.write_text("".join(f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(400)))
    return file


@pytest.fixture
def run(text, tmp_path, monkeypatch):
    """Return a function that calls the command and returns its exit code, its output, and its report or None."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent))
    monkeypatch.setenv("COLUMNS", "200")
    fixed = ("--model", "tiny", "--device", "cpu", "--text", text, "--out", tmp_path / "out", "--warmup", "1")
    demo = (
        "--device",
        "cpu",
        "--text",
        text,
        "--out",
        tmp_path / "out",
        "--vocab",
        "512",
        "--batch",
        "2",
        "--seq",
        "32",
    )

    def call(*arguments, command="train"):
        options = fixed if command == "train" else demo
        result = testing.CliRunner().invoke(app(), [command, *map(str, options), *arguments])
        report = tmp_path / "out" / ("train.json" if command == "train" else "report.json")
        return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else None

    return call


def with_one_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with torch's number of threads set to 1, which holds for the calling thread alone."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        torch.set_num_threads(1)
        return function(*args)

    return wrapper


@pytest.fixture
def threads(monkeypatch):
    """Replace processes by threads; return the list of all events."""
    events = []
    # At sizes as small as these, several threads would wait for each other.
    monkeypatch.setattr(worker.Trainer, "__init__", with_one_thread(worker.Trainer.__init__))

    class Thread:
        def __init__(self, job, log, command, settings):
            self.lines, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
            self.thread = threading.Thread(target=self.work, args=(job,), daemon=True)
            self.thread.start()

        def work(self, job):
            write_event = lambda event, **fields: self.answers.put({"event": event, **fields})
            try:
                worker.serve(job, 0, iter(self.lines.get, ""), write_event)
            except Exception as error:
                write_event("failed", out_of_memory=is_out_of_memory(error), reason=repr(error))

        def send(self, line):
            self.lines.put(line)

        def next_event(self):
            event = self.answers.get(timeout=60)
            events.append(event)
            if event["event"] == "failed":
                raise ChildFailed(event["reason"], event["out_of_memory"])
            return event

        def close(self):
            self.lines.put("")
            self.thread.join(60)

    monkeypatch.setattr(child, "Child", Thread)
    return events


def call_before_each_step(monkeypatch, act):
    """Let workers call `act(job, ids)` before each step."""
    step = worker.Trainer._step

    def _step(self, ids):
        act(self.job, ids)
        return step(self, ids)

    monkeypatch.setattr(worker.Trainer, "_step", _step)


def rows_of(report, provider):
    return [row for row in report["rows"] if row["provider"] == provider]


def test_losses_agree_and_all_files_are_written(run, threads, tmp_path):
    names = "stock,tigon,tigon-lean,liger"
    code, output, report = run(
        "--providers", names, "--batch", "2", "--seq", "48", "--steps", "12", "--curves", "--lr=3e-3"
    )
    assert code == 0, output
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {
        "config.json", "train.json", "train.md", "throughput.png", "memory.png", "loss.png",
    }  # fmt: skip
    assert report["settings"]["parameters"] == report["settings"]["parameters_of_a_rank"] > 100_000
    assert "rms_norm" in report["settings"]["applied"]["tigon"]
    for name in ("stock", "stock-reversed", "tigon", "tigon-lean"):
        (row,) = rows_of(report, name)
        assert (row["status"], len(row["losses"]), len(row["samples"]["seconds"])) == ("ok", 13, 12)
        # The model learns.
        assert row["losses"][-1] < row["losses"][0] - 0.3
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


@pytest.mark.thorough
def test_losses_outside_of_the_noise_fail_the_command(run, threads, monkeypatch):
    def zero_half_of_the_tokens(job, ids):
        if job.provider == "tigon":
            ids[:, 24:] = 0

    call_before_each_step(monkeypatch, zero_half_of_the_tokens)
    code, _, report = run("--providers", "stock,tigon", "--batch", "2", "--seq", "48", "--steps", "2", "--curves")
    assert code == 1
    assert report["curves"]["tigon"]["agrees"] is False
    assert report["curves"]["stock-reversed"]["agrees"] is True


@pytest.mark.thorough
def test_a_sweep_goes_on_after_a_size_that_does_not_fit(run, threads, monkeypatch):
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
    # A process goes on after a size that does not fit, so there is one process for each provider and round.
    assert [event["event"] for event in threads].count("ready") == 4
    assert all(len(row["samples"]["seconds"]) == 4 for row in report["rows"] if row["status"] == "ok")
    assert "stock" in output.split("out of memory")[0]


def test_a_provider_that_raises_is_a_row_and_fails_the_command_if_it_is_tigon(run, threads, monkeypatch):
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
def test_an_interrupted_command_keeps_its_measurements(run, threads, monkeypatch, tmp_path, end):
    class InterruptedChild(child.Child):
        def next_event(self):
            event = super().next_event()
            if event["event"] == "step" and any(e["event"] == "point" for e in threads):
                end()
            return event

    monkeypatch.setattr(child, "Child", InterruptedChild)
    code, _, report = run("--providers", "stock,tigon", "--seq", "16", "--steps", "2")
    assert code == INTERRUPTED
    # The command restores the handler of the signal.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert report["settings"]["interrupted"] is True
    assert [row["provider"] for row in report["rows"]] == ["stock"]
    assert (tmp_path / "out" / "throughput.png").exists()


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
    request.getfixturevalue("threads")
    _, _, alone = run("--providers", "stock", "--batch", "2", *fixed)
    (stock,) = alone["rows"]
    assert stock["tokens_per_step"] == lean["tokens_per_step"] == 2 * 32
    assert lean["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert len(lean["losses"]) == 3


# --- the demo ------------------------------------------------------------------------------------


def test_the_demo_says_that_the_curves_agree(run, tmp_path):
    """The processes are real, because two threads would draw from one random state."""
    code, output, report = run("--steps", "4", command="demo")
    assert code == 0, output
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.json", "loss.png", "speed_memory.png"}
    (stock,), (tigon,) = rows_of(report, "stock"), rows_of(report, "tigon")
    assert len(stock["losses"]) == len(tigon["losses"]) == len(tigon["samples"]["seconds"]) == 4
    assert report["comparison"]["agree"] is True
    assert stock["losses"][-1] < stock["losses"][0]
    assert report["settings"]["state_bytes"] >= 16 * report["settings"]["parameters"]
    assert "linear_cross_entropy" in report["settings"]["applied"]["tigon"]
    for part in ("tokens per second", "peak memory above the model", "The curves agree", str(tmp_path / "out")):
        assert part in output


def test_the_demo_exits_with_1_if_the_curves_differ(run, threads, monkeypatch):
    def change_the_tokens(job, ids):
        if job.provider == "tigon":
            ids[:, 24:] = 0

    call_before_each_step(monkeypatch, change_the_tokens)
    code, output, report = run("--steps", "1", command="demo")
    assert code == 1
    assert "The curves differ: " in output
    assert report["comparison"]["agree"] is False


@pytest.mark.parametrize(("error", "steps"), [(torch.OutOfMemoryError("9 GiB"), 3), (KeyError(7), 1)])
def test_a_run_of_the_demo_that_fails_ends_with_3(run, threads, monkeypatch, error, steps):
    """Without memory for one run, the other continues. Any other failure ends both."""
    calls = []

    def fail(job, ids):
        calls.append(job.provider)
        if job.provider == "stock" and calls.count("stock") == 2:
            raise error

    call_before_each_step(monkeypatch, fail)
    code, output, report = run("--steps", "3", command="demo")
    assert code == 3
    assert "stock failed after 1 steps" in output
    assert [len(row["losses"]) for row in report["rows"]] == [1, steps]


def test_a_process_that_fails_gives_its_reason_and_leaves_its_log(tmp_path):
    job = Job("stock", {"model_type": "llama"}, "absent.npy", device="nowhere")
    process = child.Child(job, tmp_path / "stock.log", child.worker_command(), {})
    try:
        with pytest.raises(ChildFailed, match="nowhere"):
            process.next_event()
    finally:
        process.close()
    assert "Traceback" in (tmp_path / "stock.log").read_text()
