"""CUDA graphs emulated on the CPU: a replay runs the captured function again, on the same static tensors.

As on a GPU, the activations of a pair are overwritten by the next forward of any pair, and its gradients by the next
backward.
"""

import contextlib
import random
import time

import torch

from tigon.graphs import calls, capture, captured_call, forward


class EmulatedMemory(capture.GraphMemory):
    """The rules of `GraphMemory` without streams and pools."""

    def __init__(self, device):
        self.device = device
        self._pending = lambda: None
        self._given = []

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)


class EmulatedPlace:
    """The place of a gradient: all views have the data of one tensor, in storages of their own."""

    def __init__(self, gradient, is_of_forward):
        self.data, self.is_of_forward = gradient.clone(), is_of_forward

    def view(self):
        # `from_dlpack` makes another storage on the same memory.
        return torch.from_dlpack(torch.utils.dlpack.to_dlpack(self.data))


class _Replay:
    def __init__(self, function):
        self.replay = function


@contextlib.contextmanager
def _no_wait():
    yield


def emulated_capture(compute, replace, memory, inputs, parameters, *, warms_up):
    """Take the place of `capture.capture`."""
    begin = time.perf_counter()
    static = {
        name: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else torch.tensor(x)
        for name, x in inputs.items()
    }
    aliases = [torch.nn.Parameter(p.detach()) for p in parameters]
    leaves = [*aliases, *(x for x in static.values() if x.requires_grad)]
    state = torch.get_rng_state()
    with replace(aliases):
        outputs, output = compute(static, aliases)
        kept = output.detach().clone()
        gradients = capture.differentiate(output, leaves, torch.ones_like(output))
    torch.set_rng_state(state)
    places = [None if g is None else EmulatedPlace(g, i == 0) for i, g in enumerate(gradients)]
    for place in places:
        if place is not None:
            place.data.fill_(torch.nan)
    outputs = capture.map_tensors(lambda x: kept if x is output else x.detach().clone(), outputs)
    tensors = []
    capture.map_tensors(tensors.append, outputs)
    upstream = torch.ones_like(kept)
    latest = []

    def replay_forward():
        with torch.enable_grad(), replace(aliases):
            results, result = compute(static, aliases)
        found = []
        capture.map_tensors(found.append, results)
        for kept_tensor, x in zip(tensors, found, strict=True):
            kept_tensor.copy_(x.detach())
        # A forward overwrites the gradients that a forward computes, and the activations of every other pair.
        for place in places:
            if place is not None and place.is_of_forward:
                place.data.fill_(torch.nan)
        memory.latest = result
        latest[:] = [result]

    def replay_backward():
        assert memory.latest is latest[0], "the activations were overwritten"
        with replace(aliases):
            gradients = capture.differentiate(latest.pop(), leaves, upstream)
        for place, gradient in zip(places, gradients, strict=True):
            if place is not None:
                place.data.copy_(gradient)

    return capture.Pair(
        memory, _Replay(replay_forward), _Replay(replay_backward), static, kept, upstream, outputs, places,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip


def emulate(monkeypatch):
    """Let models on the CPU be captured."""
    monkeypatch.setattr(calls, "is_supported", lambda device: True)
    monkeypatch.setattr(forward, "GraphMemory", EmulatedMemory)
    monkeypatch.setattr(capture, "capture", emulated_capture)
    # Here, the host draws the random numbers of the device.
    monkeypatch.setattr(captured_call, "has_drawn", lambda numbers: random.getstate() != numbers[0])
