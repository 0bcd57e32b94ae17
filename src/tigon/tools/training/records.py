"""Records that travel as JSON between processes and into reports."""

import json
import math
from dataclasses import asdict
from typing import Any, Self

__all__ = ["Record", "without_nan"]


class Record:
    """Base of dataclasses that become a JSON object and are read from one. Their fields are values that JSON has."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def without_nan(value: Any) -> Any:
    """Replace each number that is not finite by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
