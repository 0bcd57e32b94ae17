"""A training call as a pair of CUDA graphs: one replays its forward, the other its backward.

All pairs of a model share two pools of memory: forwards allocate from one, backwards from the other. The activations of
a pair are overwritten by the next forward of any pair, its gradients by the next backward, and a gradient that the
forward computes, such as that of the head, by the next forward. From this follow the rules of `GraphMemory`:

- A forward is replayed only if no backward of an earlier forward can still run.
- Autograd takes the gradients of a replay as `p.grad` without a copy. If `p.grad` still has them when they are about to
  be overwritten, its data becomes a copy first. If anything else still refers to them, the call runs eagerly. If such a
  reference appears after the forward, the backward returns copies of its gradients, and restores the old values.
"""

import copy
import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.graphs.calls import NotCaptured
from tigon.runtime.compat.graphs import StorageWeakRef, end_allocation, has_storage, storage_users
from tigon.runtime.counters import shared_in_capture


class Ticket:
    """The right to run the backward of one replayed forward. The autograd node of the call holds it."""

    is_used = False


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all calls are captured, because libraries keep memory for each stream."""
    return torch.cuda.Stream(device)


class GraphMemory:
    """The stream and the memory that all pairs of a model share."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, _stream(device)
        self.forward_pool, self.backward_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self._pending: Callable[[], Ticket | None] = lambda: None
        self._given: list[_Given] = []

    def random_state(self) -> Tensor:
        """Return the state of the random numbers of the device. The host does not wait for the device."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def has_pending_backward(self) -> bool:
        """Return whether the backward of an earlier replay can still run."""
        ticket = self._pending()
        return ticket is not None and not ticket.is_used

    def issue_ticket(self) -> Ticket:
        """Return the ticket of a forward that is about to be replayed."""
        ticket = Ticket()
        self._pending = weakref.ref(ticket)
        return ticket

    def gradients_are_shared(self) -> bool:
        """Return whether anything but `.grad` refers to gradients of the last backward."""
        self._given = [given for given in self._given if not given.storage.expired()]
        return any(storage_users(given.storage) > given.is_grad() for given in self._given)

    def keep_gradients(self, before_forward: bool = False) -> None:
        """Give every `.grad` that the next backward, or the next forward, overwrites memory of its own. It stays the
        same tensor, because the caller may hold it too."""
        for given in self._given:
            place = given.place
            if (place.is_of_forward or not before_forward) and not given.storage.expired() and given.is_grad():
                owner: Any = given.owner()
                owner.grad.data = owner.grad.clone()

    def replay_backward(self, pair: "Pair", owners: "Sequence[weakref.ref[Tensor]]") -> list[Tensor | None]:
        """Return the gradients that the backward of a pair computes, which the owners get."""
        self.keep_gradients()
        # Gradients that the caller took from `.grad` after the forward of this backward keep their values.
        used = [given.place for given in self._given if not given.storage.expired()]
        saved = [place.view().clone() for place in used]
        pair.backward.replay()
        gradients = [None if place is None else place.view() for place in pair.gradients]
        if used:
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
            for place, values in zip(used, saved, strict=True):
                place.view().copy_(values)
            return gradients
        self._given = [
            _Given(owner, StorageWeakRef(gradient.untyped_storage()), place)
            for owner, gradient, place in zip(owners, gradients, pair.gradients, strict=True)
            if gradient is not None and place is not None
        ]
        return gradients


class _Given(NamedTuple):
    """A gradient of the last backward, which is not kept alive."""

    owner: "weakref.ref[Tensor]"
    storage: StorageWeakRef
    place: "GradientPlace"

    def is_grad(self) -> bool:
        """Return whether the `.grad` of the owner has this gradient."""
        owner = self.owner()
        # torch warns of `.grad` of any other tensor.
        gradient = owner.grad if owner is not None and (owner.is_leaf or owner.retains_grad) else None
        return gradient is not None and has_storage(gradient, self.storage)


class GradientPlace:
    """The place of a gradient in the memory of a graph. It does not keep the memory from being used by other graphs.
    `torch.as_tensor` reads `__cuda_array_interface__` and makes a tensor without a copy. The tensor keeps this object
    alive, and therefore the owners of the memory."""

    def __init__(self, gradient: Tensor, owners: Any, is_of_forward: bool) -> None:
        self.owners = owners
        # True if the forward computes the gradient. The next forward then overwrites it.
        self.is_of_forward = is_of_forward
        self.shape, self.stride = gradient.shape, gradient.stride()
        self.dtype, self.device = gradient.dtype, gradient.device
        # The elements may have gaps, or a stride of zero.
        count = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        self.__cuda_array_interface__ = {
            "shape": (count * gradient.element_size() if gradient.numel() else 0,),
            "typestr": "|u1",
            "data": (gradient.data_ptr(), False),
            "strides": None,
            "version": 2,
        }

    def view(self) -> Tensor:
        """Return a tensor with a storage of its own on the memory."""
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        data = torch.as_tensor(self, device=self.device)
        return data.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(eq=False)
class Pair:
    """The two graphs of one signature, with their static tensors."""

    memory: GraphMemory
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    # The output that has a gradient, and its upstream gradient.
    output: Tensor
    upstream: Tensor
    outputs: Any
    # The place of the gradient of each tensor that the call differentiates, or None if it has none.
    gradients: Sequence[GradientPlace | None]
    # True if the forward writes to a buffer of the model. A replay must then not be discarded.
    writes_to_model: bool = False
    seconds: float = 0.0

    def replay(self, inputs: dict[str, Tensor | float], differentiated: Sequence[Tensor]) -> Any:
        """Return the output of the call for other values of the inputs and of `differentiated`."""
        for name, static in self.inputs.items():
            value = inputs[name]
            with torch.no_grad():
                _ = static.copy_(value) if isinstance(value, Tensor) else static.fill_(value)
        self.memory.keep_gradients(before_forward=True)
        output = _Replay.apply(self, self.memory.issue_ticket(), *differentiated)
        return map_tensors(lambda tensor: output if tensor is self.output else tensor.clone(), self.outputs)


class _Replay(torch.autograd.Function):
    """Replay a forward; in backward, replay its backward, and return the gradients."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, ticket: Ticket, *differentiated: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.pair, ctx.ticket = pair, ticket
        # The references are weak, because autograd holds these tensors already.
        ctx.owners = [weakref.ref(tensor) for tensor in differentiated]
        ctx.versions = [tensor._version for tensor in differentiated]
        pair.forward.replay()
        return pair.output.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        pair, ticket = ctx.pair, ctx.ticket
        if torch.is_grad_enabled():
            raise RuntimeError("tigon: a graph has no second derivative, so it refuses create_graph=True")
        if ticket.is_used:
            raise RuntimeError(
                "tigon: the backward of this graph has run already, and its activations are overwritten: a second "
                "backward (retain_graph=True) needs tigon.patch(model, graphs=False)"
            )
        if upstream is None:
            return (None,) * (2 + len(ctx.owners))
        tensors = [owner() for owner in ctx.owners]
        if any(x is not None and x._version != v for x, v in zip(tensors, ctx.versions, strict=True)):
            raise RuntimeError(
                "tigon: a parameter or an input was changed in place between the forward and the backward of a graph"
            )
        # A loss that the caller keeps does not keep the graphs.
        ctx.pair = None
        pair.upstream.copy_(upstream)
        gradients = pair.memory.replay_backward(pair, ctx.owners)
        ticket.is_used = True
        needed = ctx.needs_input_grad[2:]
        return None, None, *(x if is_needed else None for x, is_needed in zip(gradients, needed, strict=True))


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Capture what the block launches on the current stream. After an error, the process can go on."""
    # Other threads, such as that of a data loader that pins memory, may go on.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        with shared_in_capture():
            yield
    except BaseException:
        with suppress(RuntimeError):
            _end_capture(graph, pool, device)
        raise
    _end_capture(graph, pool, device)


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        end_allocation(device, pool)
        # The generator of random numbers remains in a capture until another capture of torch ends.
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        other.capture_end()
        raise


def capture(
    compute: Callable[[dict[str, Tensor], Sequence[Tensor]], tuple[Any, Tensor]],
    replace: Callable[[Sequence[nn.Parameter]], AbstractContextManager], memory: GraphMemory,
    inputs: dict[str, Tensor | float], parameters: Sequence[Tensor], *, warms_up: bool,
) -> Pair:  # fmt: skip
    """Capture a call as two graphs. `compute` takes static inputs and aliases of the `parameters`, and returns the
    outputs of the call, and the one of them that has a gradient. In the block that `replace` returns, the model has
    these aliases. A number in `inputs` becomes a tensor without dimensions. `warms_up` runs the call once before, so
    that libraries allocate what they keep."""
    begin = time.perf_counter()
    static = {name: _static_input(value, memory.device) for name, value in inputs.items()}
    # Nodes of autograd that a living loss of an earlier step refers to belong to another stream. Aliases have new ones.
    aliases = [nn.Parameter(parameter.detach()) for parameter in parameters]
    leaves = [*aliases, *(x for x in static.values() if x.requires_grad)]
    release_cached_memory(memory.device)
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    device, stream = torch.cuda.device(memory.device), torch.cuda.stream(memory.stream)
    with device, stream, torch.enable_grad(), replace(aliases):
        if warms_up:
            state = memory.random_state()
            _, output = compute(static, aliases)
            differentiate(output, leaves, torch.ones_like(output))
            memory.set_random_state(state)
            del _, output
            release_cached_memory(memory.device)
        with _capturing(graphs[0], memory.forward_pool, memory.device):
            outputs, output = compute(static, aliases)
        upstream = torch.ones_like(output)
        with _capturing(graphs[1], memory.backward_pool, memory.device):
            gradients = differentiate(output, leaves, upstream)
        pool, owners = tuple(memory.forward_pool), (*graphs, upstream)
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool]
        addresses = [range(s["address"], s["address"] + s["total_size"]) for s in segments]
        is_of_forward = lambda x: any(x.data_ptr() in segment for segment in addresses)
        places = [None if x is None else GradientPlace(x, owners, is_of_forward(x)) for x in gradients]
    torch.cuda.current_stream(memory.device).wait_stream(memory.stream)
    kept = output.detach()
    outputs = map_tensors(lambda tensor: kept if tensor is output else tensor.detach(), outputs)
    return Pair(memory, *graphs, static, kept, upstream, outputs, places, seconds=time.perf_counter() - begin)


def differentiate(output: Tensor, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
    """Return the gradients of leaves, no two of which have the same memory. The backward of a training step runs
    outside of autocast, which its forward may run in."""
    with torch.autocast(output.device.type, enabled=False):
        gradients = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    addresses: set[int] = set()
    distinct: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.data_ptr() in addresses:
            gradient = gradient.clone()
        distinct.append(gradient)
        addresses |= {0 if gradient is None else gradient.data_ptr()} - {0}
    return distinct


def _static_input(value: Tensor | float, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, device=device)
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def release_cached_memory(device: torch.device) -> None:
    """Wait for a device, and free the memory that its allocator caches: it would stay reserved beside the pools."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a copy of an output, such as a tuple or a dict of tensors, with `function` applied to every tensor. It
    raises `NotCaptured` for an object with attributes, which may hold tensors that the next replay overwrites."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        # An output of transformers is a dict with attributes, which `copy.copy` copies too.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(function, item)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if getattr(value, "__dict__", None):
        raise NotCaptured(f"its output has a {type(value).__name__}, which a graph cannot copy")
    return value
