"""Lean activations: what an op makes cheaply is not kept for backward, but made again there.

    forward     y = norm(x);  q = y Wq^T;  k = y Wk^T          autograd keeps x for the norm and y for the products
    lean        each product keeps, in place of y, the recipe norm(x), of which x is kept anyway
    backward    the first product that asks makes y, the last one that takes it lets it go

The function of an op is decorated with `remade`: its results can be made again by the same call. Inside `lean()` a
saved-tensor hook sees what any layer saves, a plain linear one, an adapter's or a quantised one. Where that is such a
result (found by its storage, so a view of it too), or a cast of one, the layer keeps the recipe. The bits are the same;
where something was written in place since, the tensor is kept, or backward refuses.

A block of `lean()` belongs to the thread that enters it, as saved-tensor hooks do, and knows of results as long as they
and it live.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tigon.memory.block import Block
from tigon.memory.offload import Away
from tigon.memory.recipe import unpack
from tigon.runtime.torch_private import (
    NAMES_FOR_LEAN,
    NAMES_FOR_OFFLOAD,
    is_checkpoint_hook,
    is_recompute_hook,
    require,
    saved_tensor_hooks,
)

__all__ = [
    "call",
    "in_checkpoint",
    "is_lean",
    "is_seen_by_nobody",
    "lean",
    "remade",
    "remade_mlp",
    "remakes_mlp",
    "remember",
    "remembers",
    "runs_again",
]

_open = 0  # blocks of `lean`, in any thread
_open_mlp = 0  # those with `mlp=True`
_in_one = False  # whether a graph is being traced of what is made again as one
_lock = threading.Lock()
_NOT_COMPILED = (
    "lean: offload=True cannot be had under torch.compile, whose graphs save all they keep at their end; "
    "compile the layers and leave the block outside, or use mlp=True"
)


def _block() -> Block | None:
    """The block whose hooks torch calls now in this thread."""
    hooks = saved_tensor_hooks(True)
    block = None if hooks is None else getattr(hooks[0], "__self__", None)
    return block if type(block) is Block else None


# --- for ops ---------------------------------------------------------------------------------------


def is_lean() -> bool:
    """Whether what is computed here is in a block of `lean`: an op may make again what it would keep."""
    if torch.compiler.is_compiling():
        return _open > 0
    return bool(_open) and _block() is not None


def remakes_mlp() -> bool:
    """Whether what is computed here is in a block of `lean(mlp=True)`: gate and up are made again too."""
    if torch.compiler.is_compiling():
        return _open_mlp > 0
    return bool(_open_mlp) and (block := _block()) is not None and block.mlp


def in_checkpoint() -> bool:
    """Whether what is computed here is in a region of `torch.utils.checkpoint`, not reentrant.

    It runs again up to the last operator that saves something: a product that is part of a node is done twice there.
    """
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks(True)
    return hooks is not None and is_checkpoint_hook(hooks[0])


def runs_again() -> bool:
    """Whether what is computed here is what a checkpoint runs again in backward: for the first run, whose it is."""
    return in_checkpoint() and is_recompute_hook(saved_tensor_hooks(True)[0])


def is_seen_by_nobody() -> bool:
    """Whether what an op saves here is kept for it alone: by a checkpoint's first run, plain `lean`, or no hooks."""
    if torch.compiler.is_compiling():
        return False
    if saved_tensor_hooks(True) is None or in_checkpoint():
        return not runs_again()
    return (block := _block()) is not None and block.outer is None and block.away is None


def remembers() -> bool:
    """Whether `remember` does anything here."""
    return bool(_open) and not torch.compiler.is_compiling() and _block() is not None


def remember(results: Tensor | tuple[Tensor | None, ...], function: Callable, *args: Any) -> None:
    """Note that `function(*args)` makes `results` again, bit for bit."""
    if remembers():
        _block().remember(results, function, args)


def _policy(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


# By a policy, because without one torch 2.11 forgets the operators inside an autograd function.
_in_graph = functools.partial(
    checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)
)


def remade(function: Callable | None = None, *, inputs: int = 0) -> Callable:
    """Decorate a function of an op: called again with the same arguments, by position, it makes the same results.

    They are remembered if the first `inputs` arguments are themselves made again, or None: for an op that does not keep
    these for its own backward.
    """
    if function is None:
        return functools.partial(remade, inputs=inputs)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not _open:
            return function(*args)
        if torch.compiler.is_compiling():  # tells the partitioner of the graph to make them again
            plain = inputs or _in_one or not torch.is_grad_enabled()
            return function(*args) if plain else _in_graph(function, *args)
        results = function(*args)
        if (block := _block()) is not None and all(x is None or block.makes(x) for x in args[:inputs]):
            block.remember(results, function, args)
        return results

    return call


def call(module: nn.Module, x: Tensor) -> Any:
    """`module(x)`, for a gate or up projection: made again in backward if `remakes_mlp()`.

    Kept all the same where another call might give other values, or do more: a module that draws random numbers or
    writes its buffers, one with hooks other than those that shard.
    """
    again = remakes_mlp() and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return _block().call(module, x) if again else module(x)


def remade_mlp(function: Callable, *args: Any) -> Any:
    """`function(*args)`, for an MLP up to its last product: its projections by `call`, then the gate.

    Under torch.compile they are made again as one: the partitioner keeps what one region of a graph takes of another.
    """
    global _in_one
    if not (torch.compiler.is_compiling() and _open_mlp and torch.is_grad_enabled()):
        return function(*args)
    _in_one = True
    try:
        return _in_graph(function, *args)
    finally:
        _in_one = False


# --- public ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lean(*, mlp: bool = False, offload: bool = False) -> Iterator[None]:
    """Keep nothing for backward that Tigon's ops make again cheaply, in this thread's forward passes in the block.

    Outputs of norms and gates, and heads that are normalised, then turned: layers that would save them save how to make
    them. Every gradient has the same bits. Backward may run anywhere. Saved-tensor hooks around the block keep what is
    left; those in it take what is saved under them. Under `torch.compile` the graph makes them again. Also a decorator.
    A block in a block adds its options.

    Args:
        mlp: Also call the gate and up projections of gated MLPs again, of Tigon's modules and of models that are
            patched: two of the nine products of the MLP are done twice, and the MLP keeps only its input.
        offload: Also move what is left, tensors of a GPU of 1 MiB and more, to pinned host memory on a side stream; it
            comes back before backward asks for it. Parameters stay, and all does on other devices, in a CUDA graph,
            and where hooks are around the block. Results must not be written in place before they have left.

    Raises:
        TypeError: An option is no bool.
        RuntimeError: Saved-tensor hooks are forbidden here, or `offload` is asked for under `torch.compile`. In
            backward, an input of such an op was written in place since.

    Source: recomputation, Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; of chosen
    ops, Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.

    Example:
        >>> x, norm, linear = torch.randn(2, 8, requires_grad=True), tigon.RMSNorm(8), torch.nn.Linear(8, 4)
        >>> with tigon.lean():
        ...     y = linear(norm(x))  # keeps x, and not what the norm gives
        >>> y.sum().backward()
    """
    global _open, _open_mlp
    for name, value in (("mlp", mlp), ("offload", offload)):
        if not isinstance(value, bool):
            raise TypeError(f"lean: {name} must be True or False, got {value!r}")
    if torch.compiler.is_compiling():
        if offload:
            raise RuntimeError(_NOT_COMPILED)
        _open, _open_mlp = _open + 1, _open_mlp + mlp
        try:
            yield
        finally:
            _open, _open_mlp = _open - 1, _open_mlp - mlp
        return
    require("lean", *NAMES_FOR_LEAN)
    if offload:
        require("lean: offload=True", *NAMES_FOR_OFFLOAD)
    outer = saved_tensor_hooks(True)
    if in_checkpoint():  # it keeps nothing anyway, and counts what is saved
        yield
        return
    inside = _block()
    block = inside or Block(outer)
    before = block.mlp, block.away
    block.mlp, block.away = mlp or block.mlp, (Away() if offload and block.away is None else block.away)
    with _lock:
        _open, _open_mlp = _open + 1, _open_mlp + mlp
    try:
        with contextlib.nullcontext() if inside else saved_tensors_hooks(block.pack, unpack):
            yield
    finally:
        if block.away is not before[1]:
            block.away.end()
        block.mlp, block.away = before
        if inside is None:
            block.known.clear()
            block.nodes.clear()
        with _lock:
            _open, _open_mlp = _open - 1, _open_mlp - mlp
