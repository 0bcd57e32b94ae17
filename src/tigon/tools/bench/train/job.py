"""What a training process is asked for: a job when it starts, then one point after the other."""

import json
from dataclasses import asdict, dataclass

__all__ = ["Job", "Point"]


@dataclass(frozen=True)
class Job:
    """A model, its data and how it is trained: everything but the size of a step.

    `config` and `tokens` are files. `ranks` processes hold a share of the model each, one holds all of it.
    """

    provider: str
    config: str
    tokens: str
    dtype: str = "bfloat16"
    device: str = "cuda"
    ranks: int = 1
    seed: int = 0
    lr: float = 1e-4
    checkpointing: bool = False
    reverse: bool = False  # sequences of a batch in reverse: the same loss, its sums in another order

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        return Job(**json.loads(text))


@dataclass(frozen=True)
class Point:
    """Steps of `batch` sequences a rank, of `seq` tokens: `warmup`, then `steps` that are timed.

    Where `seconds` would be exceeded, fewer steps are timed, but at least three.
    """

    batch: int
    seq: int
    warmup: int
    steps: int
    seconds: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Point":
        return Point(**json.loads(text))
