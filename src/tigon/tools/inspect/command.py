"""`tigon inspect`: its options and what is said. What it needs is loaded when it is called."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tigon.tools.cli import INTERRUPTED, check_file, make_console, say_written, write_file

__all__ = ["inspect"]


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
    for path, option in ((json_file, "--json"), (out, "--out")):
        if path is not None:
            check_file(path, option)
    console = make_console()
    try:
        if every:
            from tigon.tools.inspect.models_page import models_page

            with console.status("Building every model on meta"):
                page = models_page()
            if out is None:
                typer.echo(page)
            else:
                write_file(out, page, "--out")
                say_written(console, out)
            return
        from tigon.tools.inspect.build import find_config
        from tigon.tools.inspect.inspection import inspect_config

        try:
            config = find_config(model, trust_remote_code=trust_remote_code)
            inspection = inspect_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
        inspection.print(console)
        if json_file is not None:
            write_file(json_file, json.dumps(inspection.as_json(), indent=1) + "\n", "--json")
            say_written(console, json_file)
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        raise typer.Exit(INTERRUPTED) from None
