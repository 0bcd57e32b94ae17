"""A page about several runs of the training benchmark: their tables and commands, and a short table for the docs."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.train.measurement import REFERENCES
from tigon.cli.output import format_number, markdown_table

# The short table of a page is between these lines.
START, END = "<!-- The table of small batches starts here. -->", "<!-- The table of small batches ends here. -->"

_UNEVEN = ("mean_first_seconds", "mean_again_seconds")


def summary(
    folders: Annotated[list[Path], typer.Argument(help="Folders with train.json and train.md of training runs.")],
    out: Annotated[Path, typer.Option(help="The page to write: the short table, then the tables of each run.")],
    into: Annotated[
        Path | None, typer.Option(help="A page in which the short table replaces the one between its two comments.")
    ] = None,
) -> None:
    """Write a page about several training runs, and put a short table of them into a page of the docs."""
    documents = [json.loads((folder / "train.json").read_text(encoding="utf-8")) for folder in folders]
    table = "\n".join(short_table(documents))
    pages = [_section((folder / "train.md").read_text(encoding="utf-8")) for folder in folders]
    out.write_text("\n\n".join(["# Training steps of small batches", table, *pages]) + "\n", encoding="utf-8")
    if into is None:
        return
    text = into.read_text(encoding="utf-8")
    if not (START in text and END in text):
        raise typer.BadParameter(f"must be a page with the comments {START} and {END}, got {str(into)!r}")
    before, after = text.partition(START)[0], text.partition(END)[2]
    into.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def _section(page: str) -> str:
    """Return the report of one run as a part of a page, without what each provider changed in the model."""
    page = page.partition("\n## Changes by")[0].rstrip()
    page = re.sub(r"^#", "##", page, flags=re.MULTILINE)
    return re.sub(r"^<!-- (.*) -->\n(.*)", r"\2\n\n```bash\n# needs a GPU\n\1\n```", page)


def short_table(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table with the times of each case and provider, and the machines below it."""
    lines, titles = [], [_column(row) for document in documents for row in document["rows"]]
    columns = [title for title in dict.fromkeys(titles) if title is not None]
    for document in documents:
        rows = {_column(row): row for row in document["rows"]}
        name, gpu_ms = _name(document["settings"]), _as_ms(rows.get("graphs", {}).get("gpu_seconds"))

        def add(title: str, gpu_time: str, text: Callable[[dict[str, Any]], str], rows: dict = rows) -> None:
            cells = [text(rows[column]) if column in rows else "-" for column in columns]
            lines.append([title, gpu_time, *cells])

        if document["settings"]["trl"]:
            add(f"{name}, tokens/s", "-", lambda row: f"{row['tokens_per_second'] or 0:,.0f}")
            continue
        add(name, gpu_ms, lambda row: _as_ms(row["step_seconds"]) if row["step_seconds"] else row["status"])
        add("first / again", "-", lambda row: " / ".join(_as_ms(row[name]) for name in _UNEVEN if row[name]) or "-")
    versions = [
        f"{document['machine']['name']}; {', '.join(map(' '.join, document['versions'].items()))}"
        for document in documents
    ]
    return [*markdown_table(["ms", "GPU", *columns], lines, ("ms",)), "", *dict.fromkeys(versions)]


def _column(row: dict[str, Any]) -> str | None:
    """Return the title of the column of a provider, such as "tigon" for "tigon-lean"; None for a reference."""
    provider: str = row["provider"]
    if provider in REFERENCES:
        return None
    return "graphs" if provider.endswith("-graphs") else provider.partition("-")[0]


def _as_ms(seconds: float | None) -> str:
    return format_number(seconds and 1e3 * seconds)


def _name(options: dict[str, Any]) -> str:
    """Return the model, what is trained and the size of a step."""
    size = f"TRL, {options['batch']} texts" if options["trl"] else f"{options['batch']} x {options['seq']:,}"
    return f"{options['model']}{', LoRA' if options['lora'] else ''}, {size}"
