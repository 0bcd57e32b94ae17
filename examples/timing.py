"""Times of calls, and lines of tables, for the scripts that measure on a GPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["attempt", "mean_milliseconds", "milliseconds", "results"]

# The measurements of a script: results[table][line].
results: dict[str, Any] = {}


def attempt(table: str, name: str, run: Callable[[], str]) -> None:
    """Print a line of a table, or the error of its case."""
    try:
        text = run()
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        results.setdefault(table, {})[name] = {"error": text}
    print(f"  {name:44} {text}", flush=True)


def mean_milliseconds(run: Callable[[], Any], calls: int) -> float:
    """Return the mean time of a call, over some calls in a row on a GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def milliseconds(run: Callable[[], Any], rounds: int = 7, calls: int = 5) -> float:
    """Return the median over rounds of the mean time of a call; without a GPU, the time of one call."""
    if not torch.cuda.is_available():
        start_s = time.perf_counter()
        run()
        return (time.perf_counter() - start_s) * 1e3
    for _ in range(2):
        run()
    return statistics.median(mean_milliseconds(run, calls) for _ in range(rounds))
