"""Order of the steps, Ctrl-C and failures, with processes that only pretend; then one that is real."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tigon.tools.demo import runner
from tigon.tools.demo.plan import make_job
from tigon.tools.demo.presets import PRESETS
from tigon.tools.demo.report import Run
from tigon.tools.demo.runner import run_jobs
from tigon.tools.training.child import Child, ChildFailed, worker_command
from tigon.tools.training.job import Job, Point


def make_runs(take_turns: bool, steps: int = 3) -> list[Run]:
    preset = replace(PRESETS["cpu"], take_turns=take_turns, steps=steps)
    job = make_job("llama", preset, "cpu", 0, Path("tokens.npy"))
    return [
        Run("stock", "stock", "llama", preset, job),
        Run("tigon", "Tigon", "llama", preset, replace(job, provider="tigon")),
    ]


@pytest.fixture
def story(monkeypatch):
    """Replaces the processes; returns what happened, in order, and a table of what to do at (name, step)."""
    happened: list[str] = []
    surprises: dict[tuple[str, int], Callable[[], None]] = {}

    class FakeChild:
        def __init__(self, job: Job, log, command) -> None:
            self.name, self.steps = log.stem, 0
            happened.append(f"{self.name} starts")

        def next_event(self):
            facts = {"parameters": 1, "state_bytes": 16, "attention": "sdpa", "threads": 1, "applied": ""}
            return {"event": "ready", **facts}

        def ask(self, line):
            assert Point.from_json(line) == Point(PRESETS["cpu"].batch, PRESETS["cpu"].seq)
            surprises.get((self.name, self.steps), lambda: None)()
            self.steps += 1
            happened.append(f"{self.name} {self.steps}")
            return {"event": "step", "loss": 5.0 - self.steps, "seconds": 0.1, "peak_bytes": 1000}

        def __enter__(self):
            return self

        def __exit__(self, *error):
            happened.append(f"{self.name} ends")

    monkeypatch.setattr(runner, "Child", FakeChild)
    return happened, surprises


def fail(error: BaseException) -> Callable[[], None]:
    def surprise() -> None:
        raise error

    return surprise


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_turns_alternate_step_by_step(story, tmp_path, terminal):
    happened, _ = story
    runs = make_runs(take_turns=True, steps=2)
    outcome = run_jobs(runs, tmp_path, Console(force_terminal=terminal, quiet=True))
    assert happened == [
        "stock starts", "tigon starts", "stock 1", "tigon 1", "stock 2", "tigon 2", "tigon ends", "stock ends",
    ]  # fmt: skip
    assert not outcome.interrupted
    assert not outcome.failures
    assert runs[0].losses == runs[1].losses == [4.0, 3.0]
    assert runs[1].peak_bytes == 1000
    assert runs[1].facts["parameters"] == 1


def test_without_turns_one_run_follows_the_other(story, tmp_path):
    happened, _ = story
    run_jobs(make_runs(take_turns=False, steps=2), tmp_path, Console(quiet=True))
    assert happened == [
        "stock starts", "stock 1", "stock 2", "stock ends", "tigon starts", "tigon 1", "tigon 2", "tigon ends",
    ]  # fmt: skip


@pytest.mark.parametrize("take_turns", [True, False], ids=["turns", "one after the other"])
def test_interruption_ends_the_processes_and_keeps_what_there_is(story, tmp_path, take_turns):
    happened, surprises = story
    surprises["stock", 2] = fail(KeyboardInterrupt())
    runs = make_runs(take_turns)
    outcome = run_jobs(runs, tmp_path, Console(quiet=True))
    assert outcome.interrupted
    assert len(runs[0].losses) == 2
    assert len(runs[1].losses) == (2 if take_turns else 0)
    assert happened.count("stock ends") == happened.count("stock starts") == 1
    assert happened.count("tigon ends") == happened.count("tigon starts")


@pytest.mark.parametrize("take_turns", [True, False], ids=["turns", "one after the other"])
def test_a_run_out_of_memory_does_not_end_the_other(story, tmp_path, take_turns):
    _, surprises = story
    surprises["stock", 1] = fail(ChildFailed("out of memory: 9 GiB", out_of_memory=True))
    runs = make_runs(take_turns)
    outcome = run_jobs(runs, tmp_path, Console(quiet=True))
    assert outcome.failures == {"stock": "out of memory: 9 GiB"}
    assert [len(run.losses) for run in runs] == [1, 3]


@pytest.mark.parametrize("take_turns", [True, False], ids=["turns", "one after the other"])
def test_any_other_failure_ends_both(story, tmp_path, take_turns):
    _, surprises = story
    surprises["stock", 1] = fail(ChildFailed("KeyError: 7"))
    runs = make_runs(take_turns)
    outcome = run_jobs(runs, tmp_path, Console(quiet=True))
    assert outcome.failures == {"stock": "KeyError: 7"}
    assert [len(run.losses) for run in runs] == [1, 1 if take_turns else 0]


def test_a_real_process_that_fails_says_why_and_leaves_its_log(tmp_path):
    job = replace(make_runs(take_turns=True)[0].job, tokens=str(tmp_path / "absent.npy"))
    with Child(job, tmp_path / "stock.log", worker_command()) as child:
        child.next_event()
        with pytest.raises(ChildFailed, match=r"FileNotFoundError.*absent"):
            child.ask(Point(2, 32).to_json())
    assert "Traceback" in (tmp_path / "stock.log").read_text()


def test_job_survives_json():
    job = make_runs(take_turns=True)[1].job
    assert Job.from_json(job.to_json()) == job
    assert json.loads(job.to_json())["config"]["model_type"] == "llama"
