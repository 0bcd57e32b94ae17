"""The side of a training process that answers its parent: lines of JSON on standard output, and how it ends.

`tigon.tools.training.child` is the parent's side.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

__all__ = ["Say", "answer", "describe_error", "is_out_of_memory"]

MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Say(Protocol):
    """Writes an event with its fields to the parent."""

    def __call__(self, event: str, **fields: Any) -> None: ...


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out, be it torch's, a library's or the host's."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(message in str(error) for message in MEMORY_MESSAGES)


def describe_error(error: BaseException) -> str:
    """Return the reason that the parent shows.

    >>> describe_error(KeyError(7)), describe_error(MemoryError("9 GiB"))
    ('KeyError: 7', 'out of memory: 9 GiB')
    """
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {str(error).strip()}"


def _end(code: int) -> NoReturn:
    """End the process at once, without what libraries do at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def answer(serve: Callable[[int, Say], bool], ranks: int) -> int:
    """Call `serve(rank, say)` and return the exit code: 0 if it returns True. `ranks` is the size of the group.

    An error is said to the parent as an event "failed". A rank of a group ends at once, because its libraries could
    wait for the other ranks at exit.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to standard error

    def say(event: str, **fields: Any) -> None:
        # Each line is one write, because ranks share the pipe.
        os.write(answers, (json.dumps({"event": event, **fields}) + "\n").encode())

    try:
        code = 0 if serve(int(os.environ["RANK"]) if ranks > 1 else 0, say) else 1
    except BrokenPipeError:  # the parent is gone
        return 1
    except Exception as error:
        say("failed", out_of_memory=is_out_of_memory(error), reason=describe_error(error))
        if ranks == 1:
            raise
        traceback.print_exc()
        _end(1)
    if dist.is_initialized():
        dist.destroy_process_group()
        _end(code)  # a thread of gloo can abort a process while Python ends (pytorch's issue 190489)
    return code
