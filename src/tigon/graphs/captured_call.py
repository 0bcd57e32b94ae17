"""The call of a forward that is captured: its parameters, its outputs, and what it must not change."""

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tigon.graphs.calls import NotCaptured
from tigon.graphs.capture import map_tensors
from tigon.runtime.compat.autograd import AccumulateGrad


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Run a capture, which computes a call once, without changes of buffers and of random numbers on the host. It
    raises `NotCaptured` if the block draws random numbers on the host: each replay would have the same ones."""
    # A buffer that each forward writes to has been written to before.
    buffers = [(x, x.clone()) for x in model.buffers() if not x.is_inference() and x._version]
    numbers = host_random_state()
    try:
        yield
        if has_drawn(numbers):
            raise NotCaptured("it draws random numbers on the host")
    finally:
        if buffers and buffers[0][0].is_cuda:
            # The stream of a capture that failed may still write to them.
            torch.cuda.synchronize(buffers[0][0].device)
        random.setstate(numbers[0])
        torch.set_rng_state(torch.frombuffer(bytearray(numbers[1]), dtype=torch.uint8))
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


def host_random_state() -> tuple[Any, bytes]:
    """Return the states of the random numbers of Python, and of those of torch on the host."""
    return random.getstate(), torch.get_rng_state().numpy().tobytes()


def has_drawn(numbers: tuple[Any, bytes]) -> bool:
    """Return whether random numbers were drawn on the host since `host_random_state` returned these."""
    return host_random_state() != numbers


@contextmanager
def with_parameters(model: nn.Module, trained: Sequence[Tensor], others: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the modules of a model have other parameters in place of the trained ones in the block."""
    aliases = {id(p): alias for p, alias in zip(trained, others, strict=True)}
    tables = [module._parameters for module in model.modules()]
    replaced = [(table, name, p) for table in tables for name, p in table.items() if id(p) in aliases]
    try:
        for table, name, parameter in replaced:
            table[name] = aliases[id(parameter)]
        yield
    finally:
        for table, name, parameter in replaced:
            table[name] = parameter


def compute_call(
    model: nn.Module, run: Callable, context: Callable[[], AbstractContextManager],
    constants: dict[str, Any], further_leaves: list[weakref.ref[Tensor]], inputs: dict[str, Tensor],
    parameters: Sequence[nn.Parameter],
) -> tuple[Any, Tensor]:  # fmt: skip
    """Run a forward; return its outputs, and the one that has a gradient. `further_leaves` gets references to leaves
    that are neither parameters nor inputs: a hook may let the output of the embeddings need a gradient."""
    # Autocast would take the casts of the warm-up, and a replay would not cast again.
    torch.clear_autocast_cache()
    with context():
        outputs = run(model, **constants, **inputs)
    torch.clear_autocast_cache()
    found: dict[int, Tensor] = {}
    map_tensors(lambda x: found.update({id(x): x} if x.requires_grad else {}), outputs)
    if len(found) != 1:
        raise NotCaptured(f"its output has {len(found)} tensors with a gradient, and a graph has one")
    (output,) = found.values()
    known = {id(leaf) for leaf in (*parameters, *inputs.values())}
    further_leaves += [weakref.ref(leaf) for leaf in _leaves(output) if id(leaf) not in known]
    return outputs, output


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that autograd would compute gradients of, from an output."""
    stack: list[Any] = [output.grad_fn]
    seen = {*stack}
    while stack:
        node = stack.pop()
        is_leaf = isinstance(node, AccumulateGrad)
        if is_leaf:
            yield node.variable
        new = {each for each, _ in node.next_functions if each is not None} - seen
        stack += new
        seen |= new
