"""`tigon inspect`: its options and what is said. What it needs is loaded when it is called."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tigon.cli import INTERRUPTED, make_console

__all__ = ["inspect"]


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"must be a file that can be written, got {str(path)!r} ({error.strerror})"
        raise typer.BadParameter(message, param_hint=option) from error


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="Repository of the hub (owner/name), folder, config.json, or model type (its defaults)."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all of it to this file too, with the names of the modules.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that the repository brings run.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Every type that has a causal language model, as a Markdown table.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File for the table of --all.", show_default="printed")] = None,
) -> None:
    """Show what tigon.patch replaces in a model, and what it leaves alone and why.

    The model is built from its config alone, on the meta device: nothing but the config is downloaded, and a model of
    any size takes seconds.

    Exit code: 0; 2 for bad input; 130 after Ctrl-C.
    """
    if every == (model is not None):
        raise typer.BadParameter("give either MODEL or --all")
    if (out is not None and not every) or (json_file is not None and every):
        raise typer.BadParameter("--out goes with --all, --json with MODEL")
    console = make_console()
    try:
        if every:
            from tigon.inspect.models_page import models_page

            with console.status("Building every model on meta"):
                page = models_page()
            _write(out, page, "--out") if out is not None else typer.echo(page)
            return
        from tigon.inspect.build import find_config
        from tigon.inspect.inspection import inspect_config

        try:
            config = find_config(model, trust_remote_code=trust_remote_code)
            inspection = inspect_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
        inspection.print(console)
        if json_file is not None:
            _write(json_file, json.dumps(inspection.as_json(), indent=1) + "\n", "--json")
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        raise typer.Exit(INTERRUPTED) from None
