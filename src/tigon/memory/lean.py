"""Lean activations: backward recomputes what an op can recompute cheaply, instead of saving it.

    forward     y = norm(x);  q = y Wq^T;  k = y Wk^T          autograd saves x for the norm, and y for both products
    lean        In place of y, each product saves the call norm(x). The norm saves x in any case.
    backward    The first product that unpacks the call recomputes y. The last one frees y.

An op decorates a function with `recomputed_by_call` if the same call recomputes the function's results. A saved-tensor
hook inside `lean()` sees every tensor that any layer saves, whether the layer is a plain linear one, an adapter or a
quantised one. If the tensor is such a result, a view of one (recognised by its storage) or a cast of one, the hook
saves the call in place of the tensor. The recomputed bits are the same. If a tensor was written in place since, the
hook saves the result, or backward raises an error.

A block of `lean()` belongs to the thread that enters it, as saved-tensor hooks do. It recognises a result as long as
the result and the block exist.
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
from tigon.memory.recomputation import unpack
from tigon.memory.repeating import ReachableStates
from tigon.runtime.compat.autograd import is_checkpoint_hook, is_recompute_hook, saved_tensor_hooks
from tigon.runtime.compat.names import NAMES_FOR_LEAN, require_names

# The number of open blocks of `lean` in all threads.
_open_blocks = 0
# The number of those with `mlp=True`.
_open_mlp_blocks = 0
# True while torch.compile traces a region that backward recomputes as a whole.
_is_in_region = False
_lock = threading.Lock()


def _block() -> Block | None:
    """Return the block whose hooks torch calls at this point in this thread, or None."""
    hooks = saved_tensor_hooks(True)
    block = None if hooks is None else getattr(hooks[0], "__self__", None)
    return block if type(block) is Block else None


def is_lean() -> bool:
    """Return whether this call is in a block of `lean`. An op may then recompute what it would save."""
    if torch.compiler.is_compiling():
        return _open_blocks > 0
    return bool(_open_blocks) and _block() is not None


def recomputes_mlp() -> bool:
    """Return whether this call is in a block of `lean(mlp=True)`, which also recomputes the gate and up projections."""
    if torch.compiler.is_compiling():
        return _open_mlp_blocks > 0
    return bool(_open_mlp_blocks) and (block := _block()) is not None and block.mlp


def recomputes_large_mlp() -> bool:
    """Return whether backward recomputes gate and up of an MLP in tiles: in `lean(mlp=True)` and
    `recompute_large_mlps`."""
    if not _open_blocks or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return (block := _block()) is not None and (block.mlp or block.large_mlps)


@contextlib.contextmanager
def recompute_large_mlps() -> Iterator[None]:
    """Recompute gate and up of large MLPs in backward, in the block of `lean` that is open. It must not be a graph."""
    if (block := _block()) is None:
        yield
        return
    previous, block.large_mlps = block.large_mlps, True
    try:
        yield
    finally:
        block.large_mlps = previous


def share_reachable_states(states: ReachableStates) -> None:
    """Let the open block of `lean` reuse the snapshots of earlier blocks: the calls of one model have equal ones."""
    if not torch.compiler.is_compiling() and (block := _block()) is not None:
        block.reachable_states = states


def in_checkpoint() -> bool:
    """Return whether this call is in a region of non-reentrant `torch.utils.checkpoint`. Backward recomputes such a
    region up to the last operator that saves a tensor. A product inside an autograd node therefore runs twice there."""
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks(True)
    return hooks is not None and is_checkpoint_hook(hooks[0])


def is_checkpoint_recomputation() -> bool:
    """Return whether a checkpoint recomputes this call in backward. The saved tensors then belong to the first run."""
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks(True)
    return hooks is not None and is_recompute_hook(hooks[0])


def is_saved_only_by_this_op() -> bool:
    """Return whether the tensors that an op saves here are saved only for this op. That is true without saved-tensor
    hooks, in the first run of a checkpoint, and in a block of `lean` that has no saved-tensor hooks around it."""
    if torch.compiler.is_compiling():
        return False
    if (hooks := saved_tensor_hooks(True)) is None:
        return True
    if is_checkpoint_hook(hooks[0]):
        return not is_recompute_hook(hooks[0])
    return (block := _block()) is not None and block.outer is None


def registers_recomputations() -> bool:
    """Return whether `register_recomputation` has an effect here."""
    return bool(_open_blocks) and not torch.compiler.is_compiling() and _block() is not None


def register_recomputation(results: Tensor | tuple[Tensor | None, ...], function: Callable, *args: Any) -> None:
    """Record that `function(*args)` recomputes `results` with the same bits."""
    if _open_blocks and not torch.compiler.is_compiling() and (block := _block()) is not None:
        block.register(results, function, args)


def _policy(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


# The checkpoint has a policy because without one torch 2.11 ignores the operators inside an autograd function.
_checkpoint_in_graph = functools.partial(
    checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)
)


def recomputed_by_call(function: Callable | None = None, *, inputs: int = 0) -> Callable:
    """Decorate a function of an op whose results are recomputed by a call with the same positional arguments. Results
    are recomputed only if each of the first `inputs` arguments is recomputed itself, or None. This is for an op that
    does not save these arguments for its own backward."""
    if function is None:
        return functools.partial(recomputed_by_call, inputs=inputs)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not _open_blocks:
            return function(*args)
        if torch.compiler.is_compiling():
            # The checkpoint tells the partitioner of the graph to recompute the results.
            is_plain = inputs or _is_in_region or not torch.is_grad_enabled()
            return function(*args) if is_plain else _checkpoint_in_graph(function, *args)
        results = function(*args)
        if (block := _block()) is not None:
            for x in args[:inputs]:
                if x is not None and not block.can_recompute(x):
                    return results
            block.register(results, function, args)
        return results

    return call


def call_projection(module: nn.Module, x: Tensor) -> Any:
    """Return `module(x)` for a gate or up projection. Backward recomputes it if `recomputes_mlp()` is true. Backward
    does not recompute it if a second call might give other values or have side effects. That is so for a module that
    draws random numbers or writes its buffers, and for a module with hooks that do not only shard it."""
    is_recomputed = recomputes_mlp() and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    block = _block() if is_recomputed else None
    return module(x) if block is None else block.call(module, x)


def call_mlp_region(function: Callable, *args: Any) -> Any:
    """Return `function(*args)`, the part of an MLP before its last product. It calls `call_projection`. Under
    torch.compile, backward recomputes the function as one region of the graph, because the partitioner saves every
    tensor that one region reads from another."""
    global _is_in_region
    if not (torch.compiler.is_compiling() and _open_mlp_blocks and torch.is_grad_enabled()):
        return function(*args)
    _is_in_region = True
    try:
        return _checkpoint_in_graph(function, *args)
    finally:
        _is_in_region = False


@contextlib.contextmanager
def lean(*, mlp: bool = False) -> Iterator[None]:
    """Recompute cheap results of Tigon's ops in backward, for forward passes of this thread in the block.

    These results are the outputs of norms and of gates, and queries and keys after a norm of each head and a rotary
    embedding. A layer that would save one of them saves the call that recomputes it. All gradients have the same bits.
    Backward may run inside or outside the block. Saved-tensor hooks around the block receive all tensors that are still
    saved. Saved-tensor hooks inside the block receive the tensors that layers save under them. Under `torch.compile`
    the graph recomputes the results. `lean` is also a decorator. A block inside another block adds its options.

    Args:
        mlp: Also recompute the gate and up projections of gated MLPs, in Tigon's modules and in patched models, and of
            the experts of `moe_mlp`. Two of the nine products then run twice, and the MLP saves only its input.

    Raises:
        TypeError: `mlp` is not a bool.
        RuntimeError: Saved-tensor hooks are forbidden here. Backward raises it if an input of such an op was written in
            place after the call.

    Source: recomputation, Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; recomputation
    of selected ops, Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    arXiv:2205.05198.

    Example:
        >>> x, norm, linear = torch.randn(2, 8, requires_grad=True), tigon.RMSNorm(8), torch.nn.Linear(8, 4)
        >>> with tigon.lean():
        ...     y = linear(norm(x))  # Autograd saves x, but not the output of the norm.
        >>> y.sum().backward()
    """
    global _open_blocks, _open_mlp_blocks
    if not isinstance(mlp, bool):
        raise TypeError(f"lean: mlp must be True or False, got {mlp!r}")
    if torch.compiler.is_compiling():
        _open_blocks, _open_mlp_blocks = _open_blocks + 1, _open_mlp_blocks + mlp
        try:
            yield
        finally:
            _open_blocks, _open_mlp_blocks = _open_blocks - 1, _open_mlp_blocks - mlp
        return
    require_names("lean", *NAMES_FOR_LEAN)
    outer = saved_tensor_hooks(True)
    # A checkpointed region saves no tensors in any case, and the checkpoint counts the tensors that its hooks receive.
    if in_checkpoint():
        yield
        return
    enclosing = _block()
    block = enclosing or Block(outer)
    previous, block.mlp = block.mlp, mlp or block.mlp
    with _lock:
        _open_blocks, _open_mlp_blocks = _open_blocks + 1, _open_mlp_blocks + mlp
    try:
        with contextlib.nullcontext() if enclosing else saved_tensors_hooks(block.pack, unpack):
            yield
    finally:
        block.mlp = previous
        if enclosing is None:
            block.by_storage.clear()
            block.by_node.clear()
        with _lock:
            _open_blocks, _open_mlp_blocks = _open_blocks - 1, _open_mlp_blocks - mlp
