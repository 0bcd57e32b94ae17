"""The child's side of a training process: read points, answer with events, exchange values between ranks, end.

An event is a line of JSON. `benchmarks.train.child` is the parent's side.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

# After a point that failed, a process trains another point only if its memory is at most this multiple of its memory
# before the failed point.
MEMORY_AFTER_FAILURE = 1.02

MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class WriteEvent(Protocol):
    """A function that writes an event with its fields to the parent."""

    def __call__(self, event: str, **fields: Any) -> None: ...


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` of torch, a library or the host says that memory ran out."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(message in str(error) for message in MEMORY_MESSAGES)


def describe_error(error: BaseException) -> str:
    """Return the reason that the parent shows.

    >>> describe_error(KeyError(7)), describe_error(MemoryError("9 GiB"))
    ('KeyError: 7', 'out of memory: 9 GiB')
    """
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {str(error).strip()}"


# --- points --------------------------------------------------------------------------------------


class Rank:
    """A process that trains, alone or as a rank of a group: its device, and the exchange of values with other ranks.

    A subclass has an optimizer, counts its `steps`, and trains points. With `ends_if_out_of_memory`, a point that does
    not fit ends the process. With `keeps_gradients`, gradients are zeroed in place and not freed.
    """

    optimizer: torch.optim.Optimizer
    ends_if_out_of_memory = False
    keeps_gradients = False
    steps = 0

    def __init__(self, device: str, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.device = rank, ranks, torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank if ranks > 1 else self.device.index or 0)
            torch.cuda.set_device(self.device)

    def train(self, line: str) -> dict[str, Any]:
        """Train the point that `line` holds and return the fields of the event "point"."""
        raise NotImplementedError

    def synchronise(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        """Return the bytes of all tensors on the GPU; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def free(self) -> None:
        """Free all memory except parameters, optimizer states and, with `keeps_gradients`, gradients."""
        self.zero_gradients()
        gc.collect()
        self.synchronise()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self.ranks == 1:
            return value
        values_of_root = [value]
        dist.broadcast_object_list(values_of_root, 0)
        return values_of_root[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def merge_ranks(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the mean of "losses" and the maximum of each other field over all ranks.

        Lists are merged item by item.
        """
        ranks = self.gather(fields)
        merged_fields: dict[str, Any] = {}
        for name, field in fields.items():
            values = [rank[name] for rank in ranks]
            if name == "losses":
                merged_fields[name] = [sum(losses) / len(losses) for losses in zip(*values, strict=True)]
            elif isinstance(field, list):
                merged_fields[name] = [max(items) for items in zip(*values, strict=True)]
            else:
                merged_fields[name] = None if field is None else max(values)
        return merged_fields

    def next_line(self, lines: Iterator[str]) -> str:
        """Return the next line of rank 0, or "" at the end."""
        return self.broadcast(next(lines, "").strip() if self.rank == 0 else "")


def answer_points(
    start: Callable[[WriteEvent], Rank], rank: int, lines: Iterator[str], write_event: WriteEvent
) -> bool:
    """Build the trainer with `start` and train a point for each line; return whether the process ends without an error.

    A single process that runs out of memory frees what the point allocated and takes the next point. A group ends,
    because its other ranks wait inside a step.
    """
    # Rank 0 writes the events of a group, but a rank that fails reports its failure itself.
    write_group_event: WriteEvent = write_event if rank == 0 else lambda *_, **__: None
    reason = ""
    trainer = start(write_group_event)
    while line := trainer.next_line(lines):
        before = trainer.allocated() if trainer.steps else None
        try:
            write_group_event("point", **trainer.train(line))
            continue
        except Exception as error:
            if trainer.ranks > 1 or not is_out_of_memory(error):
                raise
            reason = describe_error(error)
        # Free memory outside the handler: inside it, the frames of the error still hold tensors.
        trainer.free()
        if trainer.ends_if_out_of_memory or before is None or trainer.allocated() > MEMORY_AFTER_FAILURE * before:
            write_event("failed", out_of_memory=True, reason=reason)
            return False
        write_group_event("out of memory", reason=reason)
    return True


# --- the process ---------------------------------------------------------------------------------


def _end(code: int) -> NoReturn:
    """End the process at once, without the exit handlers of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def answer(serve: Callable[[int, WriteEvent], bool], ranks: int) -> int:
    """Call `serve(rank, write_event)` and return the exit code: 0 if it returns True. `ranks` is the size of the group.

    An error goes to the parent as an event "failed". A rank of a group then ends at once, because its libraries could
    wait for the other ranks at exit.
    """
    # Events go to a copy of standard output. Everything that libraries print goes to standard error.
    events = os.dup(1)
    os.dup2(2, 1)

    def write_event(event: str, **fields: Any) -> None:
        # Each line is a single write, because ranks share the pipe.
        os.write(events, (json.dumps({"event": event, **fields}) + "\n").encode())

    try:
        code = 0 if serve(int(os.environ["RANK"]) if ranks > 1 else 0, write_event) else 1
    except BrokenPipeError:
        # The parent has ended.
        return 1
    except Exception as error:
        write_event("failed", out_of_memory=is_out_of_memory(error), reason=describe_error(error))
        if ranks == 1:
            raise
        traceback.print_exc()
        _end(1)
    if dist.is_initialized():
        dist.destroy_process_group()
        # A thread of gloo can abort a process while Python ends (pytorch's issue 190489).
        _end(code)
    return code
