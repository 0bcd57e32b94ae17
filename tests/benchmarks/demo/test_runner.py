"""The order of the steps, Ctrl-C and failures, with simulated processes; then failures of a real process."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.demo.demo_plan import make_job
from benchmarks.demo.demo_presets import DEMO_PRESETS
from benchmarks.demo.demo_runs import DemoRun, train_runs
from benchmarks.training import child
from benchmarks.training.child import Child, ChildFailed, Event, worker_command
from benchmarks.training.job import Job, Point


def make_runs(take_turns: bool, steps: int = 3) -> list[DemoRun]:
    preset = replace(DEMO_PRESETS["cpu"], take_turns=take_turns, steps=steps)
    job = make_job("llama", preset, "cpu", 0, Path("tokens.npy"))
    return [
        DemoRun("stock", "stock", "llama", preset, job),
        DemoRun("tigon", "Tigon", "llama", preset, replace(job, provider="tigon")),
    ]


@pytest.fixture
def fake_children(monkeypatch):
    """Replace the processes. Return the list of their actions, and a table of functions by (name, step).

    The function is called before the process of this name takes this step. Steps are counted from 0.
    """
    actions: list[str] = []
    callbacks: dict[tuple[str, int], Callable[[], None]] = {}

    class FakeChild:
        def __init__(self, job: Job, log: Path, command: list[str], settings: dict[str, str]) -> None:
            self.name, self.steps, self.is_ready = log.stem, 0, False
            actions.append(f"{self.name} starts")

        def send(self, line: str) -> None:
            assert Point.from_json(line) == Point(DEMO_PRESETS["cpu"].batch, DEMO_PRESETS["cpu"].seq)

        def next_event(self) -> Event:
            if not self.is_ready:
                self.is_ready = True
                facts = {"parameters": 1, "state_bytes": 16, "attention": "sdpa", "threads": 1, "applied": ""}
                return {"event": "ready", **facts}
            callbacks.get((self.name, self.steps), lambda: None)()
            self.steps += 1
            actions.append(f"{self.name} {self.steps}")
            return {
                "event": "point", "losses": [5.0 - self.steps], "seconds": [0.1], "host_seconds": [0.1],
                "allocated": 1016, "reserved": None,
            }  # fmt: skip

        def close(self) -> None:
            actions.append(f"{self.name} ends")

    monkeypatch.setattr(child, "Child", FakeChild)
    return actions, callbacks


def fail(error: BaseException) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_runs_take_turns_step_by_step(fake_children, tmp_path, terminal):
    actions, _ = fake_children
    runs = make_runs(take_turns=True, steps=2)
    assert train_runs(runs, tmp_path, Console(force_terminal=terminal, quiet=True))
    assert actions == [
        "stock starts", "tigon starts", "stock 1", "tigon 1", "stock 2", "tigon 2", "tigon ends", "stock ends",
    ]  # fmt: skip
    assert not any(run.failure for run in runs)
    assert runs[0].losses == runs[1].losses == [4.0, 3.0]
    assert runs[1].peak_bytes == 1000
    assert runs[1].facts["parameters"] == 1


def test_without_turns_one_run_follows_the_other(fake_children, tmp_path):
    actions, _ = fake_children
    train_runs(make_runs(take_turns=False, steps=2), tmp_path, Console(quiet=True))
    assert actions == [
        "stock starts", "stock 1", "stock 2", "stock ends", "tigon starts", "tigon 1", "tigon 2", "tigon ends",
    ]  # fmt: skip


@pytest.mark.parametrize("take_turns", [True, False], ids=["turns", "one after the other"])
def test_ctrl_c_ends_the_processes_and_keeps_the_steps(fake_children, tmp_path, take_turns):
    actions, callbacks = fake_children
    callbacks["stock", 2] = fail(KeyboardInterrupt())
    runs = make_runs(take_turns)
    assert not train_runs(runs, tmp_path, Console(quiet=True))
    assert len(runs[0].losses) == 2
    assert len(runs[1].losses) == (2 if take_turns else 0)
    assert actions.count("stock ends") == actions.count("stock starts") == 1
    assert actions.count("tigon ends") == actions.count("tigon starts")


@pytest.mark.parametrize("take_turns", [True, False], ids=["turns", "one after the other"])
def test_a_run_out_of_memory_does_not_end_the_other(fake_children, tmp_path, take_turns):
    _, callbacks = fake_children
    callbacks["stock", 1] = fail(ChildFailed("out of memory: 9 GiB", out_of_memory=True))
    runs = make_runs(take_turns)
    assert train_runs(runs, tmp_path, Console(quiet=True))
    assert [run.failure for run in runs] == ["out of memory: 9 GiB", ""]
    assert [len(run.losses) for run in runs] == [1, 3]


@pytest.mark.parametrize("take_turns", [True, False], ids=["turns", "one after the other"])
def test_any_other_failure_ends_both(fake_children, tmp_path, take_turns):
    _, callbacks = fake_children
    callbacks["stock", 1] = fail(ChildFailed("KeyError: 7"))
    runs = make_runs(take_turns)
    assert train_runs(runs, tmp_path, Console(quiet=True))
    assert [run.failure for run in runs] == ["KeyError: 7", ""]
    assert [len(run.losses) for run in runs] == [1, 1 if take_turns else 0]


def test_a_process_that_fails_gives_its_reason_and_leaves_its_log(tmp_path):
    job = replace(make_runs(take_turns=True)[0].job, tokens=str(tmp_path / "absent.npy"))
    process = Child(job, tmp_path / "stock.log", worker_command(), {})
    try:
        process.next_event()
        process.send(Point(2, 32).to_json())
        with pytest.raises(ChildFailed, match=r"FileNotFoundError.*absent"):
            process.next_event()
    finally:
        process.close()
    assert "Traceback" in (tmp_path / "stock.log").read_text()


def test_a_job_is_the_same_after_a_round_trip_through_json():
    job = make_runs(take_turns=True)[1].job
    assert Job.from_json(job.to_json()) == job
    assert json.loads(job.to_json())["config"]["model_type"] == "llama"
