"""The messages from a command to a training process: a job when it starts, then one point after the other."""

from dataclasses import dataclass
from typing import Any

from tigon.tools.training.records import Record

__all__ = ["Job", "Point"]


@dataclass(frozen=True)
class Job(Record):
    """A model, its data and how it is trained: everything but the size of a step.

    `config` holds the fields of a transformers config, `tokens` names a file. Each of `ranks` processes holds a shard
    of the model; a single process holds all of it.

    `turns`: each point is one step, and the process waits for the next point after it. Gradients and optimizer states
    exist before the first step, and memory is counted above them.
    """

    provider: str
    config: dict[str, Any]
    tokens: str
    dtype: str = "bfloat16"
    device: str = "cuda"
    ranks: int = 1
    seed: int = 0
    lr: float = 1e-4
    checkpointing: bool = False
    # The sequences of a batch come in reverse order: the loss is the same, its sums are taken in another order.
    reverse: bool = False
    turns: bool = False


@dataclass(frozen=True)
class Point(Record):
    """Steps of `batch` sequences on each rank, of `seq` tokens each: `warmup`, then `steps` that are timed.

    Where `seconds` would be exceeded, fewer steps are timed, but at least three.
    """

    batch: int
    seq: int
    warmup: int = 0
    steps: int = 1
    seconds: float | None = None
