"""Dataclasses and reports as JSON."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

__all__ = ["JobRecord", "write_json"]


class JobRecord:
    """Base of dataclasses that are written as a JSON object and read from one. JSON must have a form for all fields."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def _without_nan(value: Any) -> Any:
    """Replace each number that is not finite by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, report: dict[str, Any], indent: int = 1) -> None:
    """Write a report. The file is complete at any moment, because it is renamed into its place."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(_without_nan(report), indent=indent, default=str) + "\n", encoding="utf-8")
    unfinished.replace(path)
