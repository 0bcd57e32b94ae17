"""The command of the training benchmark: the order of the runs, the printed output and the files."""

import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.report import describe_machine, make_folder, takes_options
from benchmarks.train import report
from benchmarks.train.measurement import Measurement, compare_with_stock
from benchmarks.train.plan import ProviderRun, TrainOptions, TrainPlan, make_plan, search_sizes
from benchmarks.train.process import run_process
from tigon.cli.main import INTERRUPTED, make_console, pick_device

# The exit code if Tigon fails or its losses differ. The exit code for bad input is 2.
DIFFERS = 1
# These facts of the processes are settings in the report.
FACTS = ("parameters", "parameters_of_a_rank", "attention", "state_bytes", "threads")


@takes_options
def train(options: TrainOptions) -> None:
    """Train one model on real text, stock and with each provider, and compare speed, memory and losses.

    Each provider has a process of its own, or a group of them, and the same random weights, data and optimizer. Writes
    train.json, train.md, speed_memory.png and, without a sweep, loss.png. A provider that is not installed, refuses the
    model or runs out of memory is a line in the report.

    Exit code: 0; 1 if Tigon raised an error, or with --curves its losses differ by more than the noise; 2 for bad
    input; 130 after Ctrl-C (the report has the sizes that were done).
    """
    console, device = make_console(), pick_device(options.device)
    folder = make_folder(options.out, "train_")
    try:
        with console.status("Reading and tokenising the text"):
            plan = make_plan(replace(options, device=device))
        code = TrainSession(plan, folder, console).run()
    except ValueError as problem:
        # Only an empty folder can be removed.
        with suppress(OSError):
            folder.rmdir()
        raise typer.BadParameter(str(problem)) from problem
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        code = INTERRUPTED
    raise typer.Exit(code)


def _title(plan: TrainPlan) -> str:
    """Return a line about the model and its training."""
    options = plan.options
    layers = f", {options.layers} layers" if options.layers else ""
    processes = f"{options.gpus} ranks, FSDP2" if options.gpus > 1 else "one process"
    sizes = {None: f"{options.batch} x {options.seq:,} tokens", "seq": f"batch {options.batch}"}
    size = sizes.get(options.sweep, f"{options.seq:,} tokens a sequence")
    lora = "" if options.lora is None else f", {'QLoRA' if options.qlora else 'LoRA'} of rank {options.lora}"
    if options.trl:
        size, lora = f"{options.batch} texts of at most {options.seq:,} tokens", f"{lora}, TRL's SFTTrainer"
    lengths = f", then lengths of {options.lengths}" if options.lengths else ""
    return f"{options.model}{layers}, {plan.dtype}, {processes}, {size}{lora}{lengths}"


@dataclass
class TrainSession:
    """The runs of a plan, all their measurements in the order in which they began, and the settings of the report."""

    plan: TrainPlan
    folder: Path
    console: Console
    rows: list[Measurement] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Train all runs, write the numbers after each one and the report at the end, and return the exit code."""
        plan, console, start_time = self.plan, self.console, time.perf_counter()
        machine = describe_machine(torch.device(plan.options.device))
        self.settings = {
            **asdict(plan.options), "title": _title(plan), "dtype": plan.dtype, "steps": plan.steps,
            "warmup": plan.warmup, "runs": [run.name for run in plan.runs], "text": plan.corpus.name,
            "text_tokens": plan.tokens.count, "bpe_entries": plan.tokens.entries, "interrupted": False,
            "machine": machine, "applied": {},
        }  # fmt: skip
        del self.settings["out"]
        plan.config.to_json_file(self.folder / "config.json", use_diff=False)
        console.print(f"[bold]{escape(self.settings['title'])}[/], {escape(str(machine['name']))}")
        console.print(f"Text: {escape(plan.corpus.name)}, {plan.tokens.count:,} tokens. {report.legend(machine)}\n")
        try:
            self._train_rounds()
        except KeyboardInterrupt:
            self.rows = [row for row in self.rows if row.seconds or row.status != "ok"]
            self.settings["interrupted"] = True
        self.settings["seconds"] = round(time.perf_counter() - start_time, 1)
        names = ", ".join(report.write_files(self.folder, self.rows, self.settings))
        for table in report.console_tables(self.rows, self.settings):
            console.print("", table)
        if self.settings["interrupted"]:
            console.print("[bold yellow]Interrupted[/]: the report has what was done.")
        folder = escape(str(self.folder))
        console.print(f"{self.settings['seconds']:.0f} s. Report in [bold]{folder}[/]: {names}", soft_wrap=True)
        return INTERRUPTED if self.settings["interrupted"] else self._judge()

    def _judge(self) -> int:
        """Return the exit code. FP8 approximates, so its losses are compared but do not decide."""
        curves = compare_with_stock(self.rows) if self.plan.options.curves else {}
        exact = [run.name for run in self.plan.runs if run.provider.is_tigon and run.provider.fp8 is None]
        differ = any(curve.agrees is False for name, curve in curves.items() if name in exact)
        return DIFFERS if differ or any(row.failed for row in self.rows) else 0

    def _train_rounds(self) -> None:
        """Train all runs, in rounds. A later round repeats the sizes that fitted. Every second round is in reverse
        order, because a warm chip is slower."""
        plan = self.plan
        fitting_sizes: dict[str, list[int]] = {}
        with ExitStack() as stack:
            sources = {
                run.name: str(stack.enter_context(run.revision.files()).parent) if run.revision else ""
                for run in plan.runs
            }
            for index in range(plan.options.rounds):
                for run in plan.runs if index % 2 == 0 else reversed(plan.runs):

                    def attempt(size: int, run: ProviderRun = run) -> bool | None:
                        return self._attempt(run, size, sources[run.name])

                    if index == 0:
                        fitting_sizes[run.name] = plan.search(attempt)
                    else:
                        search_sizes(attempt, sorted(fitting_sizes[run.name]))

    def _row(self, name: str, size: int) -> Measurement:
        """Return the measurement of a run at a size: a new one, or that of an earlier round."""
        batch, seq = self.plan.shape(size)
        for row in self.rows:
            if (row.provider, row.batch, row.seq) == (name, batch, seq):
                return row
        self.rows.append(Measurement(name, batch, seq, self.plan.options.gpus))
        return self.rows[-1]

    def _attempt(self, run: ProviderRun, size: int, source: str) -> bool | None:
        """Train a run at a size, print its row, and return whether it fits; None if it failed for another reason."""
        row = self._row(run.name, size)
        with self.console.status(f"{escape(run.name)}, {row.batch} x {row.seq:,}"):
            result = run_process(asdict(self.plan.job(run, size)), self.folder / f"{run.name}.log", source=source)
        status = result["status"]
        if status == "ok":
            row.add(result)
            self.settings |= {name: result[name] for name in FACTS}
            self.settings["applied"] |= {run.name: result["applied"]} if result["applied"] else {}
        elif status == "out of memory" and row.seconds:
            # The measurements of an earlier round remain valid.
            row.note = "out of memory in a later round"
        else:
            row.status, row.note = status, "" if status == "out of memory" else " ".join(result["note"].split())[:400]
        self.console.print(escape(report.sentence(row)))
        report.write_json(self.folder, self.rows, self.settings)
        return {"ok": True, "out of memory": False}.get(status)
