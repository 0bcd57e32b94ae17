"""Write reports: tables of text cells for the terminal, numbers in them, and JSON."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def format_number(value: float | None) -> str:
    """Format a number with three or more significant digits and without an exponent.

    >>> format_number(0.12345), format_number(1234.5), format_number(None)
    ('0.1235', '1,234', '-')
    """
    if value is None:
        return "-"
    for limit, digits in ((1, 4), (10, 3), (100, 2), (1000, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def console_table(titles: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[str], title: str) -> "Table":
    """Return a table for the terminal, which breaks long cells. The columns in `left` are aligned to the left."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    for name in titles:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _without_nan(value: Any) -> Any:
    """Replace each number that is not finite by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report. The file is complete at any moment, because it is renamed into its place."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(_without_nan(report), indent=1, default=str) + "\n", encoding="utf-8")
    unfinished.replace(path)
