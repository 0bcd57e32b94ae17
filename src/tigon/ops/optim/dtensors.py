"""This rank's part of a DTensor. Parameters that FSDP2 or tensor parallelism shards are DTensors."""

from typing import Any

from torch import Tensor

from tigon.runtime.device import PLAIN


def is_dtensor(x: Any) -> bool:
    return type(x) not in PLAIN and hasattr(x, "to_local") and hasattr(x, "placements")


def local_part(x: Any) -> Tensor:
    return x.to_local() if is_dtensor(x) else x
