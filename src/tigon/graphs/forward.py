"""The forward of a model whose training calls run as CUDA graphs.

A call is captured at the third use of its signature. After the first capture, a signature whose length is one of a few
is captured at its first use. Before that, and whenever a graph would not compute what the eager forward computes, the
call runs eagerly, and the record says why.
"""

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from tigon.graphs import capture as capturing
from tigon.graphs.calls import Call, NotCaptured, bind, check_torch, divide_arguments
from tigon.graphs.capture import GraphMemory, Pair
from tigon.graphs.captured_call import compute_call, restored, with_parameters
from tigon.graphs.state import ModelState
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.compat.modules import is_replica

LOGGER = logging.getLogger("tigon")

# Uses of a signature that run eagerly before it is captured: rare signatures are not worth the time.
EAGER_USES = 2
# A further signature replaces the pair that was used least if it was used this many times as often.
MOST_PAIRS, MORE_USES = 16, 2
# If the model has changed this often, it changes in every step, and is not captured again.
MOST_CHANGES = 4
# Changes do not count if each signature was used this often in between: a capture takes the time of so many replays.
WORTHWHILE_USES = 50
# After this many failed captures, no other signature is captured.
MOST_FAILURES = 3

# Captures share a stream, and what `tigon.runtime.counters` and functions of transformers do in a capture.
_one_capture = threading.RLock()
# True in a thread while the forward of a model with graphs runs.
_running = threading.local()


class Captured(NamedTuple):
    """A pair of graphs that was captured."""

    signature: str
    seconds: float


@dataclass
class GraphRecord:
    """The pairs of graphs that were captured, and the numbers of eager calls with their reasons. A report has it."""

    captured: list[Captured] = field(default_factory=list)
    # The number of eager calls for each reason.
    eager: Counter[str] = field(default_factory=Counter)
    replayed: int = 0

    def __str__(self) -> str:
        seconds = sum(pair.seconds for pair in self.captured)
        lines = [f"graphs: {len(self.captured)} captured in {seconds:.1f} s, {self.replayed} calls replayed"]
        lines += [f"  captured: {pair.signature} ({pair.seconds:.1f} s)" for pair in self.captured]
        lines += [f"  eager: {count} calls: {reason}" for reason, count in self.eager.most_common()]
        return "\n".join(lines)


class Preparation(NamedTuple):
    """A call as a graph may compute it."""

    # The arguments by name.
    arguments: dict[str, Any]
    # The context in which the forward runs while it is captured.
    context: Callable[[], contextlib.AbstractContextManager]
    # True if the length of the call is one of a few. Such a call may be captured at its first use.
    is_bucket: bool


class GraphedForward:
    """Recipe that runs a forward, or another recipe, as a pair of graphs where this is possible. `prepare` returns the
    call with arguments for which few signatures exist. `check` raises `NotCaptured` if no call of the model can be
    captured as it is now."""

    def __init__(
        self, inner: Callable | None, record: GraphRecord,
        prepare: Callable[[nn.Module, dict[str, Any]], Preparation], check: Callable[[nn.Module], None],
    ) -> None:  # fmt: skip
        self.inner, self.record, self.prepare, self.check = inner, record, prepare, check
        # A reason why no call can be captured.
        self.obstacle: str | None = None
        # Two threads may call a model.
        self.lock = threading.Lock()
        self.forget()
        self.changes = self.failures = 0

    def __reduce__(self) -> tuple:
        # A copy of the model captures graphs of its own.
        return GraphedForward, (self.inner, GraphRecord(), self.prepare, self.check)

    def forget(self) -> None:
        """Drop all pairs, and count the uses of signatures from zero."""
        if memory := getattr(self, "memory", None):
            memory.keep_gradients()
        self.memory: GraphMemory | None = None
        self.pairs: dict[tuple, Pair] = {}
        self.uses: Counter[tuple] = Counter()
        self.refused: dict[tuple, str] = {}
        self.state: ModelState | None = None

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self.inner or type(model).forward
        if self.is_part_of_another(model):
            return run(model, *args, **kwargs)
        _running.is_on = True
        try:
            with self.lock:
                try:
                    return self.compute(model, run, bind(type(model).forward, args, kwargs))
                except NotCaptured as reason:
                    self.note(str(reason))
                # While a thread captures, the parameters of the model are others, which get no gradients.
                if torch.is_grad_enabled():
                    return run(model, *args, **kwargs)
            return run(model, *args, **kwargs)
        finally:
            _running.is_on = False

    def is_part_of_another(self, model: nn.Module) -> bool:
        """Return whether a call is a part of another call, of a trace or of a capture."""
        return (
            torch.compiler.is_compiling()
            or getattr(_running, "is_on", False)
            or has_active_transform()
            or is_replica(model)
            or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        )

    def compute(self, model: nn.Module, run: Callable, arguments: dict[str, Any]) -> Any:
        """Return the output of a call from a pair of graphs."""
        if not model.training or not torch.is_grad_enabled():
            raise NotCaptured("it does not train")
        if self.obstacle is not None and not self.pairs:
            raise NotCaptured(self.obstacle)
        check_torch()
        if self.state is None:
            self.check(model)
        elif (change := self.state.changed_tensor()) is not None:
            self.forget_after(change)
        preparation = self.prepare(model, arguments)
        call = divide_arguments(preparation.arguments, next(model.parameters()).device)
        output = self.replay(call, self.find_pair(model, run, call, preparation))
        self.record.replayed += 1
        return output

    def replay(self, call: Call, pair: Pair) -> Any:
        """Return the output of a replay. The host compares the attributes of the model with those of the capture while
        the device computes. If one has changed, the result is discarded, and the random numbers of the device are drawn
        again."""
        assert self.state is not None
        tensors = [*self.state.trained, *call.differentiated()]
        if pair.writes_to_model and (change := self.state.change()) is not None:
            self.forget_after(change)
        random_state = pair.memory.random_state()
        output = pair.replay(call.inputs, tensors)
        if (change := self.state.change()) is not None:
            pair.memory.set_random_state(random_state)
            self.forget_after(change)
        return output

    def find_pair(self, model: nn.Module, run: Callable, call: Call, preparation: Preparation) -> Pair:
        """Return the pair of graphs of a call, which this call may capture."""
        # A graph without a mask, for one sample in a row, must not compute packed samples.
        key = (*call.signature(), preparation.context)
        if (reason := self.refused.get(key, self.obstacle)) is not None and key not in self.pairs:
            raise NotCaptured(reason)
        self.uses[key] += 1
        is_at_once = preparation.is_bucket and 0 < len(self.pairs) < MOST_PAIRS
        if self.uses[key] <= EAGER_USES and not is_at_once:
            raise NotCaptured("signatures are captured at their third use")
        if self.memory is not None:
            if self.memory.has_pending_backward():
                raise NotCaptured("the backward of an earlier call has not run")
            if self.memory.gradients_are_shared():
                raise NotCaptured("gradients of an earlier step are still in use outside of .grad")
        if key not in self.pairs:
            if self.state is not None and (change := self.state.change()) is not None:
                self.forget_after(change)
            self.pairs[key] = self.capture(model, run, call, key, preparation)
        return self.pairs[key]

    def forget_after(self, change: str) -> NoReturn:
        """Drop all pairs because the model has changed since they were captured, and let the call run eagerly."""
        # Replays of many uses are worth a capture.
        uses = sum(map(self.uses.__getitem__, self.pairs))
        self.changes = 1 if uses > WORTHWHILE_USES * len(self.pairs) else self.changes + 1
        self.forget()
        reason = f"{change} has changed"
        if self.changes >= MOST_CHANGES:
            self.obstacle = reason = f"{change} has changed after {self.changes} captures"
        raise NotCaptured(reason)

    def capture(self, model: nn.Module, run: Callable, call: Call, key: tuple, preparation: Preparation) -> Pair:
        """Capture the call; after an error, its signature runs eagerly from then on."""
        if self.memory is None or self.state is None:
            self.memory, self.state = GraphMemory(next(model.parameters()).device), ModelState(model)
        if len(self.pairs) >= MOST_PAIRS:
            least = min(self.uses[each] for each in self.pairs)
            if self.uses[key] < MORE_USES * least:
                raise NotCaptured(f"there are {MOST_PAIRS} pairs of graphs, and its signature is not used more often")
            self.drop_least_used()
        further_leaves: list[weakref.ref[Tensor]] = []
        compute = functools.partial(compute_call, model, run, preparation.context, call.constants, further_leaves)
        # A backward that runs a part of the forward again takes the same tensors.
        replace = functools.partial(with_parameters, model, self.state.trained)
        text, versions = call.describe(), self.state.tensor_versions()
        try:
            with _one_capture, restored(model):
                pair = self._capture(compute, replace, call)
                # A leaf that is freed with the call has no gradient that can be read.
                if any(leaf() is not None for leaf in further_leaves):
                    raise NotCaptured("it differentiates a tensor that is neither a parameter nor an argument")
        except Exception as error:
            reason = str(error) if isinstance(error, NotCaptured) else f"{type(error).__name__}: {error}"
            reason = f"it cannot be captured ({reason.splitlines()[0] if reason else reason})"
            self.refused[key] = reason
            LOGGER.warning("tigon: the training call %s runs without a graph: %s", text, reason)
            LOGGER.debug("the error of the capture", exc_info=True)
            self.failures += 1
            self.obstacle = reason if self.failures >= MOST_FAILURES else None
            raise NotCaptured(reason) from error
        finally:
            # The run before the capture must not count as a run of the forward.
            change = self.state.change()
            if change is not None:
                self.state.restore()
        if change is not None:
            self.refused[key] = reason = f"its forward changes {change.removesuffix(' has changed')}"
            raise NotCaptured(reason)
        pair.writes_to_model = self.state.tensor_versions() != versions
        self.record.captured.append(Captured(text, pair.seconds))
        # Tell the user why this step takes so long.
        text = f"tigon: captured {text} as a pair of CUDA graphs in {pair.seconds:.1f} s"
        LOGGER.info(text) if LOGGER.isEnabledFor(logging.INFO) else print(text, file=sys.stderr, flush=True)
        return pair

    def _capture(self, compute: Callable, replace: Callable, call: Call) -> Pair:
        """Capture a call. If the memory does not suffice, the pair that was used least makes room. The first capture
        has a warm-up. A later one has it only if a library cannot prepare a new length during a capture, because a
        warm-up takes as much memory as an eager step."""
        assert self.memory is not None
        assert self.state is not None
        make = functools.partial(capturing.capture, compute, replace, self.memory, call.inputs, self.state.trained)
        if self.pairs:
            try:
                return make(warms_up=False)
            except torch.cuda.OutOfMemoryError:
                self.drop_least_used()
                if self.pairs:
                    return make(warms_up=False)
            except RuntimeError:
                LOGGER.debug("tigon: a capture without a warm-up failed", exc_info=True)
        return make(warms_up=True)

    def drop_least_used(self) -> None:
        """Drop the pair whose signature was used least."""
        assert self.memory is not None
        # Without a pair, the pools are freed.
        self.memory.keep_gradients()
        del self.pairs[min(self.pairs, key=self.uses.__getitem__)]

    def note(self, reason: str) -> None:
        """Record that a call runs eagerly."""
        if reason not in self.record.eager:
            LOGGER.debug("tigon: a training call runs without a graph: %s", reason)
        self.record.eager[reason] += 1
