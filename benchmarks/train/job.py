"""The messages from a command to a training process: a job when it starts, then one point after the other."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


class Record:
    """Base of dataclasses that are written as a JSON object and read from one. JSON has the types of all fields."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


class RankJob(Record):
    """Base of jobs for one process, or for a group of `ranks` processes."""

    device: str
    ranks: int


@dataclass(frozen=True)
class Job(RankJob):
    """A model, its data and the settings of its training, without the size of a step.

    `config` holds the fields of a transformers config, `tokens` is the path of a file. Each of `ranks` processes holds
    a shard of the model; a single process holds all of it. With `reverse`, the sequences of a batch come in reverse
    order, so that the loss is the same and its sums are taken in another order. With `continues`, a point continues
    with the data after the previous point, and gradients and optimizer states exist before the first step. With `lora`,
    only adapters of this rank are trained; with `qlora`, the layers that have adapters are in 4 bits. `source` is the
    folder from which the process imports Tigon, "" for that of this process.
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
    reverse: bool = False
    continues: bool = False
    lora: int | None = None
    qlora: bool = False
    source: str = ""


@dataclass(frozen=True)
class Point(Record):
    """The size of a step, `batch` sequences of `seq` tokens on each rank, and the number of steps.

    `warmup` steps come first, then `steps` that are timed. If these would take more than `seconds`, fewer steps are
    timed, but at least three.
    """

    batch: int
    seq: int
    warmup: int = 0
    steps: int = 1
    seconds: float | None = None
