"""The command line of the benchmarks: `python -m benchmarks ops | train | demo | resources`."""

import typer

from benchmarks.compile.command import resources
from benchmarks.ops.session import bench
from benchmarks.train.command import train
from tigon.cli.main import run_application, sigterm_interrupts


def app() -> typer.Typer:
    application = typer.Typer(
        help="Measure the ops and the training of Tigon, and compile its kernels.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    application.command("ops")(sigterm_interrupts()(bench))
    application.command("train")(sigterm_interrupts()(train))
    help_text = "Train a small decoder, stock and with Tigon, and compare: `train --case demo`."
    demo = application.command("demo", help=help_text, context_settings={"default_map": {"case": "demo"}})
    demo(sigterm_interrupts()(train))
    application.command("resources")(sigterm_interrupts()(resources))
    return application


if __name__ == "__main__":
    run_application(app(), None, "python -m benchmarks")
