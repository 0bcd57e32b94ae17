"""A page about several runs of the training benchmark: their tables and commands, and a short table for the docs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.train.measurement import REFERENCES
from tigon.cli.output import format_number, markdown_table

# The short table of a page is between these lines.
START, END = "<!-- The table of small batches starts here. -->", "<!-- The table of small batches ends here. -->"
TITLES = ("case", "provider", "GPU ms", "ms", "tokens/s", "x stock", "first ms", "x stock", "again ms")


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
    """Return the lines of a table with a line for each case and provider, and the machines below it."""
    lines = []
    for document in documents:
        rows = [row for row in document["rows"] if row["provider"] not in REFERENCES]
        stock: dict[str, Any] = next((row for row in rows if row["provider"] == "stock"), {})
        lines += [[_name(document["settings"]) if row is rows[0] else "", *_cells(row, stock)] for row in rows]
    versions = [
        f"{document['machine']['name']}; {', '.join(map(' '.join, document['versions'].items()))}"
        for document in documents
    ]
    return [*markdown_table(TITLES, lines, ("case", "provider")), "", *dict.fromkeys(versions)]


def _name(options: dict[str, Any]) -> str:
    """Return the model, what is trained and the size of a step."""
    size = f"TRL, {options['batch']} texts" if options["trl"] else f"{options['batch']} x {options['seq']:,}"
    return f"{options['model']}{', LoRA' if options['lora'] else ''}, {size}"


def _cells(row: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    def ratio(numerator: float | None, denominator: float | None) -> str:
        return f"{numerator / denominator:.2f}" if numerator and denominator else "-"

    as_ms = lambda seconds: format_number(seconds and 1e3 * seconds)
    speed, first = row["tokens_per_second"], row["mean_first_seconds"]
    return [
        row["provider"], as_ms(row["gpu_seconds"]), as_ms(row["step_seconds"]) if speed else row["status"],
        f"{speed:,.0f}" if speed else "-", ratio(speed, stock.get("tokens_per_second")), as_ms(first),
        ratio(stock.get("mean_first_seconds"), first), as_ms(row["mean_again_seconds"]),
    ]  # fmt: skip
