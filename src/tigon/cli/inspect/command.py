"""The command `tigon inspect`: its options and its output. The modules that it needs are imported when it is called."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.main import check_file, make_console, say_written, write_file
from tigon.cli.presets import MODEL_HELP


def inspect(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results, with the names of all modules, to this file.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code of the repository to run.")
    ] = False,
) -> None:
    """Show which modules of a model tigon.patch replaces, which ones keep their code, and why.

    The model is built from its config alone, on the meta device. Only the config is downloaded, and a model of any size
    takes seconds.

    The exit code is 0, or 2 for bad input, and 130 after Ctrl-C.
    """
    if json_file is not None:
        check_file(json_file, "--json")
    from tigon.cli.inspect.build import find_config
    from tigon.cli.inspect.inspection import inspect_config

    try:
        config = find_config(model, trust_remote_code=trust_remote_code)
        inspection = inspect_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    console = make_console()
    inspection.print(console)
    if json_file is not None:
        write_file(json_file, json.dumps(inspection.as_json(), indent=1) + "\n", "--json")
        say_written(console, json_file)
