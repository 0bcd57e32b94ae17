"""Outputs of attention in checkpointed layers: the first run saves them, so that the second run needs no attention.

    forward     A mode sees each operator that the layer calls. It saves the outputs of an attention kernel: the output
                [tokens, heads, D] and the log-sum-exp [tokens, heads] in fp32.
    backward    In the second run, the mode returns these tensors in place of a call of the kernel. The autograd node
                of attention is the usual one, and saves them together with the queries, keys and values that the second
                run has computed.
    afterwards  The mode forgets the outputs at the end of the second run. The node frees them.

A call of the second run gets the saved outputs of the call with the same number in the first run, if the kernels and
the forms of their arguments (shape, strides, dtype, options) are the same. Otherwise, or if the outputs were written in
place, the kernel runs again, with the same bits. Calls without gradients, such as those that compute a cached tensor
once, have no number. The outputs of a kernel with dropout are not saved: without its call, the random numbers that the
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
from tigon.runtime.compat.autograd import (
    backward_id,
    is_checkpoint_hook,
    keeps_graph,
    saved_tensor_hooks,
    shared_versions,
)
from tigon.runtime.compat.graphs import CALLER_OF_GRAPHS, TransparentMode
from tigon.runtime.compat.operators import schema_of

# The operators of torch, and of the packages flash-attn and xformers and their builds on the hub, that compute
# attention. Each returns the output first, and the log-sum-exp that its backward needs.
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?"
    r"|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|torch_attn::_varlen_attn(_out)?"
    r"|\w*flash_attn\w*::(_flash_attn_|mha_)?(varlen_)?(fwd|forward)"
    r"|xformers_flash::flash_fwd|xformers\w*::efficient_attention_forward\w*"
)
# Some packages declare that a kernel writes these arguments, although it only reads them.
_READ_ARGUMENTS = frozenset({"q", "k", "v", "query", "key", "value"})


class AttentionKernel(NamedTuple):
    """The positions and the names of some arguments of an attention kernel, from its schema."""

    dropout: tuple[tuple[int, str], ...]  # The probability of dropout
    results: tuple[tuple[int, str], ...]  # The tensors that the caller may pass for the results.

    def find_obstacle(self, args: tuple, kwargs: dict) -> str | None:
        """Return why the outputs of a call must not be saved; None if they may."""
        if any(_argument(place, args, kwargs) for place in self.dropout):
            return "attention has dropout"
        if any(_argument(place, args, kwargs) is not None for place in self.results):
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
        if name.startswith(CALLER_OF_GRAPHS):
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
    results = tuple(
        (i, a.name)
        for i, a in places
        if a.alias_info is not None and a.alias_info.is_write and a.name not in _READ_ARGUMENTS
    )
    return AttentionKernel(dropout, results)


def _form(value: Any) -> Any:
    """Return what must be the same in both runs of a layer: the form of a tensor, and the value of an option."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


class _Mode(TransparentMode):
    """A block in which `run(name, call, may_save)` makes the calls of attention kernels."""

    def __init__(self, run: Callable[[Any, Callable[[], Any], bool], Any], outputs: "AttentionOutputs") -> None:
        super().__init__()
        self.run, self.outputs = run, outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        kernel = find_kernel(func)
        if kernel is None:
            return func(*args, **kwargs)
        obstacle = kernel.find_obstacle(args, kwargs)
        if obstacle is not None:
            self.outputs.obstacle = obstacle
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        name = func, _form(args), tuple((key, _form(value)) for key, value in kwargs.items())
        return self.run(name, functools.partial(func, *args, **kwargs), obstacle is None)


class _Block(threading.local):
    """The mode of the innermost block of this thread."""

    mode: _Mode | None = None


_block = _Block()


def run_attention(name: Any, call: Callable[[], Any]) -> Any:
    """Return `call()`, or its results that the first run saved, for attention that is no operator of torch. Both runs
    pass an equal name. `call` returns a tuple of tensors and draws no random numbers."""
    return call() if _block.mode is None else _block.mode.run(name, call, True)


class AttentionOutputs:
    """A function that calls layer `index` for a checkpoint. The first run saves the outputs of attention for the
    second, each as `save(tensor)`, which has a method `unpack`, or as the tensor itself if `save` is None. `layers` is
    told what was saved."""

    def __init__(
        self, function: Callable, layers: "LayerAttention", index: int, save: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.function, self.layers, self.index = function, layers, index
        outer = saved_tensor_hooks(True)
        # Saved-tensor hooks around the layer receive these tensors too, as they do without a checkpoint.
        if outer is not None and not is_checkpoint_hook(outer[0]):
            save = lambda t: PackedTensor(outer[0](t), outer[1])
        self.save = save
        # One entry for each call of attention in the first run; None for a call whose outputs are not saved.
        self.entries: list[_SavedCall | None] = []
        # The number of entries that the second run has used.
        self.position = 0
        # The reason why outputs are not saved, if there were some.
        self.obstacle: str | None = None

    def __call__(self, *args: Any) -> Any:
        if is_checkpoint_recomputation():
            self.position = 0
            try:
                return self._call(self._repeat, args) if any(self.entries) else self.function(*args)
            finally:
                if backward_id() != -1 and not keeps_graph():
                    self.entries = []
        if not torch.is_grad_enabled():
            return self.function(*args)
        self.entries = []
        results = self._call(self._run, args)
        self.entries = [entry if entry is None or entry.end_first_run() else None for entry in self.entries]
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

    def _run(self, name: Any, call: Callable[[], Any], may_save: bool) -> Any:
        """Call attention, and save its outputs if `may_save` is True."""
        results = call()
        self.entries.append(_SavedCall(name, results, self.save) if may_save else None)
        return results

    def _repeat(self, name: Any, call: Callable[[], Any], may_save: bool) -> Any:
        """Return the saved outputs, or call attention if there are none."""
        self.position += 1
        entry = self.entries[self.position - 1] if self.position <= len(self.entries) else None
        if entry is None or not may_save or entry.name != name or not entry.is_unchanged():
            return call()
        return entry.results()


class _SavedCall:
    """The saved outputs of one call of attention, whose name holds the operator and the form of its arguments. `save`
    is that of `AttentionOutputs`."""

    def __init__(self, name: Any, results: Any, save: Callable[[Tensor], Any] | None) -> None:
        self.name = name
        # The type of a sequence of results. It is None for one tensor.
        self.sequence = type(results) if isinstance(results, (tuple, list)) else None
        values = list(results) if self.sequence is not None else [results]
        # The results of an operator get their autograd node later, so the aliases have none.
        with shared_versions():
            aliases = [x.detach() if isinstance(x, Tensor) else None for x in values]
            self.replacements = [
                None if save is None or alias is None or type(x) is not Tensor else save(alias)
                for x, alias in zip(values, aliases, strict=True)
            ]
        self.values: list = [x if alias is None else None for x, alias in zip(values, aliases, strict=True)]
        # Autograd counts the writes to a tensor in its version, which an alias shares.
        self.aliases: list[tuple[Tensor, int] | None] = [
            None if alias is None else (alias, alias._version) for alias in aliases
        ]

    def end_first_run(self) -> bool:
        """Free the tensors that have a replacement. Return whether no output was written in place before that."""
        if not self.is_unchanged():
            return False
        pairs = zip(self.aliases, self.replacements, strict=True)
        self.aliases = [alias if replacement is None else None for alias, replacement in pairs]
        return True

    def is_unchanged(self) -> bool:
        """Return whether no output was written in place since it was saved."""
        return all(alias is None or alias[0]._version == alias[1] for alias in self.aliases) and all(
            getattr(replacement, "is_unchanged", True) for replacement in self.replacements
        )

    def results(self) -> Any:
        """Return new aliases of the outputs, because the caller adds its autograd node to them."""
        with shared_versions():
            values = [self._result(i) for i in range(len(self.values))]
        return values[0] if self.sequence is None else self.sequence(values)

    def _result(self, i: int) -> Any:
        alias, replacement = self.aliases[i], self.replacements[i]
        if replacement is not None:
            return replacement.unpack().detach()
        return self.values[i] if alias is None else alias[0].detach()


class LayerAttention:
    """The layers of a stack that save the outputs of attention: the last `layers` of those that are checkpointed (None:
    all), because backward frees these outputs before the gradients of the others exist. With `warns`, the object warns
    once if no layer saves any."""

    def __init__(self, layers: int | None = None, checkpointed: int = 0, warns: bool = False) -> None:
        self.layers, self.checkpointed, self.warns = layers, checkpointed, warns
        # `has_outputs` is True if a layer has saved outputs in the current forward pass. `obstacle` is the reason why
        # one has not.
        self.has_outputs, self.obstacle = False, ""

    def includes(self, index: int) -> bool:
        """Return whether layer `index` saves the outputs of attention."""
        return self.layers is None or self.checkpointed - self.layers <= index < self.checkpointed

    def end_layer(self, index: int, outputs: AttentionOutputs) -> None:
        """Note whether a layer has saved outputs. After the last layer, warn once if no layer has."""
        self.has_outputs = self.has_outputs or any(outputs.entries)
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
