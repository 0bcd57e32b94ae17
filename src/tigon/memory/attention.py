"""Outputs of attention in checkpointed layers: the first run saves them, so that the second run needs no attention.

    forward     A mode sees each operator that the layer calls. It saves the outputs of an attention kernel: the output
                [tokens, heads, D] and the log-sum-exp [tokens, heads] in fp32.
    backward    In the second run, the mode returns these tensors in place of a call of the kernel. The autograd node
                of attention is the usual one, and saves them together with the queries, keys and values that the second
                run has computed.
    afterwards  The mode forgets the outputs at the end of the second run. The node frees them.

A second run never depends on the saved outputs. If they are missing, or were written in place, the kernel runs again,
with the same bits. The outputs of a kernel with dropout are not saved: without its call, the random numbers that the
rest of the layer draws would differ.

The mode costs the host 8 us for each operator of the layer, in each run, on a slow core.
"""

import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tigon.memory.lean import is_checkpoint_recomputation
from tigon.memory.recomputation import PackedTensor
from tigon.runtime.torch_private.autograd import backward_id, is_checkpoint_hook, keeps_graph, saved_tensor_hooks
from tigon.runtime.torch_private.graphs import TransparentMode
from tigon.runtime.torch_private.operators import schema_of

__all__ = ["AttentionOutputs", "LayerAttention", "attention_contexts_in_graph", "find_kernel", "run_attention"]

# The operators of torch, and of the packages flash-attn and xformers and their builds on the hub, that compute
# attention. Each returns the output first, and the log-sum-exp that its backward needs.
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?"
    r"|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|torch_attn::_varlen_attn(_out)?"
    r"|\w*flash_attn\w*::\w*(fwd|forward)"
    r"|xformers_flash::flash_fwd|xformers\w*::efficient_attention_forward\w*"
)
# The module whose functions call a compiled graph.
_COMPILED_CALLER = "torch._functorch._aot_autograd."


class AttentionKernel(NamedTuple):
    """What the schema of an attention kernel says: the positions of some arguments, and their names."""

    dropout: tuple[tuple[int, str], ...]
    written: tuple[tuple[int, str], ...]

    def find_obstacle(self, args: tuple, kwargs: dict) -> str | None:
        """Return why the outputs of a call must not be saved; None if they may."""
        if any(_argument(place, args, kwargs) for place in self.dropout):
            return "attention has dropout"
        if any(_argument(place, args, kwargs) is not None for place in self.written):
            return "attention writes its output into a tensor of its caller"
        return "attention runs in a compiled graph" if _is_in_compiled_graph() else None


def _argument(place: tuple[int, str], args: tuple, kwargs: dict) -> Any:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def _is_in_compiled_graph() -> bool:
    """Return whether a compiled graph makes this call. Its compiler may reuse the memory of any tensor unnoticed."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_COMPILED_CALLER):
            return True
        frame = None if frame.f_code is AttentionOutputs.__call__.__code__ else frame.f_back
    return False


@functools.cache
def find_kernel(operator: Any) -> AttentionKernel | None:
    """Return the attention kernel that an operator of torch calls; None if it is another operator."""
    schema = schema_of(operator)
    if schema is None or _ATTENTION.fullmatch(schema.name) is None:
        return None
    places = [(i, argument) for i, argument in enumerate(schema.arguments)]
    dropout = tuple((i, a.name) for i, a in places if a.name in ("dropout_p", "p_dropout", "p", "dropout"))
    written = tuple((i, a.name) for i, a in places if a.alias_info is not None and a.alias_info.is_write)
    return AttentionKernel(dropout, written)


# --- one call of a layer ---------------------------------------------------------------------------


class _Mode(TransparentMode):
    """A block in which `run(operator, call)` makes the calls of attention kernels."""

    def __init__(self, run: Callable[[Any, Callable[[], Any]], Any], outputs: "AttentionOutputs") -> None:
        super().__init__()
        self.run, self.outputs = run, outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        kernel = find_kernel(func)
        if kernel is None:
            return func(*args, **kwargs)
        if (obstacle := kernel.find_obstacle(args, kwargs)) is not None:
            self.outputs.obstacle = obstacle
            return func(*args, **kwargs)
        return self.run(func, functools.partial(func, *args, **kwargs))


class _Block(threading.local):
    """The mode of the innermost block of this thread."""

    mode: _Mode | None = None


_block = _Block()


def run_attention(name: Any, call: Callable[[], Any]) -> Any:
    """Return `call()`, or the saved results of the first run. For attention that is no operator of torch.

    Args:
        name: An object that both runs of a layer pass for the same attention.
        call: The function that computes a tuple of tensors. It draws no random numbers.
    """
    return call() if _block.mode is None else _block.mode.run(name, call)


class AttentionOutputs:
    """A function that calls a layer for a checkpoint. The first call saves the outputs of attention for the second.

    Args:
        function: The function that calls the layer.
        layers: The object that is told what the layer, which has the number `index`, has saved.
        save: A function that returns an object to save in place of a tensor, with a method `unpack`; None to save the
            tensor itself.
    """

    def __init__(
        self, function: Callable, layers: "LayerAttention", index: int, save: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.function, self.layers, self.index = function, layers, index
        outer = saved_tensor_hooks(True)
        # Saved-tensor hooks around the layer receive these tensors too, as they do without a checkpoint.
        if outer is not None and not is_checkpoint_hook(outer[0]):
            save = lambda t: PackedTensor(outer[0](t.detach()), outer[1])
        self.save = save
        # One entry for each call of attention: its name, the saved objects, and the type of the sequence that it
        # returns, or None if it returns one tensor.
        self.entries: list[tuple[Any, list, Callable | None]] = []
        # The number of entries that the second run has used.
        self.position = 0
        # The reason why outputs are not saved, if there were some.
        self.obstacle: str | None = None

    def __call__(self, *args: Any) -> Any:
        """Call the layer."""
        if is_checkpoint_recomputation():
            self.position = 0
            try:
                return self._call(self._repeat, args) if self.entries else self.function(*args)
            finally:
                if backward_id() != -1 and not keeps_graph():
                    self.entries = []
        if not torch.is_grad_enabled():
            return self.function(*args)
        self.entries = []
        results = self._call(self._run, args)
        self.layers.end_layer(self.index, self)
        return results

    def _call(self, run: Callable, args: tuple) -> Any:
        outer, mode = _block.mode, _Mode(run, self)
        try:
            with mode:
                _block.mode = mode
                return self.function(*args)
        finally:
            _block.mode = outer

    def _run(self, name: Any, call: Callable[[], Any]) -> Any:
        """Call attention and save its outputs."""
        results = call()
        is_sequence = isinstance(results, (tuple, list))
        packed = [self._pack(x) for x in (results if is_sequence else (results,))]
        self.entries.append((name, packed, type(results) if is_sequence else None))
        return results

    def _pack(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        view = None if self.save is None or type(x) is not Tensor else self.save(x)
        # The results of an operator get their autograd node later, so the alias has none.
        return (x.detach(), x._version) if view is None else view

    def _repeat(self, name: Any, call: Callable[[], Any]) -> Any:
        """Return the saved outputs, or call attention if there are none."""
        self.position += 1
        entry = self.entries[self.position - 1] if self.position <= len(self.entries) else None
        if entry is None or entry[0] is not name:
            return call()
        _, packed, restore = entry
        if not all(map(_is_unchanged, packed)):
            return call()
        values = [_unpack(x) for x in packed]
        return values[0] if restore is None else restore(values)


def _is_unchanged(packed: Any) -> bool:
    """Return whether a saved tensor has not been written in place."""
    if isinstance(packed, tuple):
        return packed[0]._version == packed[1]
    return getattr(packed, "is_unchanged", True)


def _unpack(packed: Any) -> Any:
    """Return a new alias of a saved tensor, because the caller adds its autograd node to it."""
    if isinstance(packed, tuple):
        return packed[0].detach()
    return packed.unpack().detach() if hasattr(packed, "unpack") else packed


# --- the layers of a stack -------------------------------------------------------------------------


class LayerAttention:
    """The layers of a stack that save the outputs of attention.

    Args:
        layers: The number of layers, up to the last checkpointed one, that save them; None for all layers. The last
            ones are chosen, because backward frees their outputs before the gradients of the others exist.
        checkpointed: The number of layers, from the first one on, that are checkpointed.
        warns: Whether to warn if no layer saves any.
    """

    def __init__(self, layers: int | None = None, checkpointed: int = 0, warns: bool = False) -> None:
        self.layers, self.checkpointed, self.warns = layers, checkpointed, warns
        # Whether a layer has saved outputs in the current forward pass, and the reason why one has not.
        self.has_outputs, self.obstacle = False, ""

    def includes(self, index: int) -> bool:
        """Return whether layer `index` saves the outputs of attention."""
        return self.layers is None or self.checkpointed - self.layers <= index < self.checkpointed

    def end_layer(self, index: int, outputs: AttentionOutputs) -> None:
        """Note whether a layer has saved outputs. After the last layer, warn once if no layer has."""
        self.has_outputs = self.has_outputs or bool(outputs.entries)
        self.obstacle = outputs.obstacle or self.obstacle
        if index < self.checkpointed - 1:
            return
        if self.warns and not self.has_outputs:
            self.warns = False
            reason = self.obstacle or "no attention kernel of torch or flash-attn runs in them"
            warnings.warn(
                f"tigon: backward runs attention again, because no checkpointed layer has saved its outputs: {reason}",
                stacklevel=2,
            )
        self.has_outputs, self.obstacle = False, ""


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if find_kernel(operator) is None else CheckpointPolicy.MUST_SAVE


# The option `context_fn` of a checkpoint in a graph of torch.compile. The graph saves the outputs of attention.
attention_contexts_in_graph = functools.partial(create_selective_checkpoint_contexts, _policy)
