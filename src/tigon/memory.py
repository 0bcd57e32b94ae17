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
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["lean", "remade", "remember", "remembers"]

# The innermost saved-tensor hooks of this thread: torch calls no others. Since torch 2.8.
_innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

_open = 0  # blocks of `lean`, in any thread
_lock = threading.Lock()


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


# --- what is kept in place of a tensor -------------------------------------------------------------


class _Recipe:
    """A call that makes results again, shared by all who saved one of them.

    Tensors of one dimension, the parameters of norms, are copied: engines that shard a model take those away between
    forward and backward, and give them back for the backward of their own module alone.
    """

    __slots__ = (
        "args", "autocast", "device", "function", "given", "kept", "left", "round", "savers", "stream", "strides",
        "values",
    )  # fmt: skip

    def __init__(self, function: Callable, args: tuple, results: tuple[Tensor | None, ...], device: torch.device):
        self.function, self.args = function, list(args)
        self.given: dict[int, tuple[Tensor, int]] = {}  # which of the arguments are tensors; and their versions
        self.kept: dict[int, Any] | None = None  # the same, as they are kept for backward, once somebody saves a result
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                if x.dim() > 1:
                    self.given[i], self.args[i] = (x, x._version), None
                else:
                    self.args[i] = x.detach().clone()
        self.strides = [None if y is None else y.stride() for y in results]
        self.device, self.stream, self.autocast = device, _stream(device), _autocast(device)
        # Of each result: itself while it is needed, how many saved it, how many have yet to take it, how often made.
        n = len(results)
        self.values: list[Tensor | None] = [None] * n
        self.savers, self.left, self.round = [0] * n, [0] * n, [0] * n

    def keep(self, pack: Callable[[Tensor], Any]) -> bool:
        """Keep the arguments for backward, if they still are what the results were made of."""
        if self.kept is None:
            if any(x._version != version for x, version in self.given.values()):
                return False
            self.kept = {i: pack(x) for i, (x, _) in self.given.items()}
            self.given = {}
        return True

    def make(self, own_stream: bool) -> list[Tensor | None]:
        """All results anew, on the stream of the forward pass or on another."""
        args = self.args.copy()
        for i, kept in self.kept.items():
            args[i] = x = _unpack(kept)
            if not own_stream:  # its memory belongs to the other, which might use it again too early
                x.record_stream(torch.cuda.current_stream(self.device))
        plain = not torch.is_grad_enabled() and _autocast(self.device) == self.autocast
        results = self.function(*args) if plain else self._as_in_forward(args)
        results = results if isinstance(results, tuple) else (results,)
        return [y if y is None else _with_strides(y, s) for y, s in zip(results, self.strides, strict=True)]

    def _as_in_forward(self, args: list) -> Any:
        kind, enabled = self.device.type, self.autocast is not None
        with torch.no_grad(), torch.autocast(kind, self.autocast, enabled, cache_enabled=False):
            return self.function(*args)

    def take(self, i: int, result: "_Result") -> Tensor:
        """Result i for one of its savers; it is held until each of them has taken it."""
        if _stream(self.device) != self.stream:
            return self.make(False)[i]
        value = self.values[i]
        if value is None:
            made = self.make(True)
            value = made[i]
            for j, savers in enumerate(self.savers):
                if savers and self.values[j] is None:
                    self.values[j], self.left[j], self.round[j] = made[j], savers, self.round[j] + 1
        if result.round != self.round[i]:
            result.round = self.round[i]
            self.left[i] -= 1
            if self.left[i] <= 0:
                self.values[i] = None
        return value


def _with_strides(y: Tensor, strides: tuple[int, ...]) -> Tensor:
    if y.stride() == strides:
        return y
    return torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)


class _Result:
    """A result of a recipe, or a view `t` of it, as one of its savers keeps it."""

    __slots__ = ("index", "recipe", "round", "view")

    def __init__(self, recipe: _Recipe, index: int, y: Tensor, t: Tensor) -> None:
        self.recipe, self.index, self.round = recipe, index, 0
        view = t.shape, t.stride(), t.storage_offset()
        self.view = None if view == (y.shape, y.stride(), 0) else view
        recipe.savers[index] += 1

    def take(self) -> Tensor:
        value = self.recipe.take(self.index, self)
        return value if self.view is None else value.as_strided(*self.view)


class _Elsewhere:
    """A tensor as the hooks around the block keep it: on the host, say."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack = packed, unpack

    def take(self) -> Tensor:
        return self.unpack(self.packed)


def _unpack(kept: Any) -> Tensor:
    if type(kept) is not tuple:
        return kept.take()
    # Hooks turn off autograd's own check.
    x, version = kept
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
        )
    return x


# --- what is known in a block ----------------------------------------------------------------------


class _Known:
    """A live tensor, its version, and how it is kept: result `index` of a recipe, or elsewhere."""

    __slots__ = ("how", "index", "node", "ref", "version")

    def __init__(self, x: Tensor, forget: Callable, how: _Recipe | _Elsewhere, index: int = 0) -> None:
        # Of the tensor, not of its storage: its version tells of writing through any view. It lives as long as these.
        self.ref, self.version, self.how, self.index = weakref.ref(x, forget), x._version, how, index
        self.node = x.grad_fn, x.output_nr

    def current(self, t: Tensor) -> Tensor | None:
        """The tensor, if `t`, of its storage, has nothing but its values."""
        x = self.ref()
        unchanged = x is not None and x._version == self.version == t._version and x.dtype == t.dtype
        return x if unchanged else None


class _Block:
    """The saved-tensor hooks of one block of `lean`."""

    def __init__(self, outer: tuple[Callable, Callable] | None) -> None:
        self.outer = outer
        self.known: dict[int, _Known] = {}  # by storage
        self.nodes: dict[tuple, _Known] = {}  # by what computed it, for its casts

    def learn(self, x: Tensor, how: _Recipe | _Elsewhere, index: int = 0) -> None:
        key = x.untyped_storage()._cdata

        def forget(ref: weakref.ref | None = None) -> None:
            if key in self.known and (ref is None or self.known[key].ref is ref):
                self.nodes.pop(self.known.pop(key).node, None)

        forget()
        self.known[key] = new = _Known(x, forget, how, index)
        if type(how) is _Recipe:
            self.nodes[new.node] = new

    def remember(self, results: Tensor | tuple, function: Callable, args: tuple) -> None:
        results = results if isinstance(results, tuple) else (results,)
        recipe = None
        for i, y in enumerate(results):
            if type(y) is Tensor and y.requires_grad and _is_whole(y):
                recipe = recipe or _Recipe(function, args, results, y.device)
                self.learn(y, recipe, i)

    def find(self, t: Tensor) -> tuple[_Known, Tensor] | None:
        """What is known of a tensor or of that which it is a view of."""
        known = self.known.get(t.untyped_storage()._cdata)
        x = None if known is None else known.current(t)
        return None if x is None else (known, x)

    def makes(self, t: Tensor) -> bool:
        """Whether a tensor is a result that can be made again, or a view of one."""
        found = self.find(t) if type(t) is Tensor else None
        return found is not None and type(found[0].how) is _Recipe

    def find_cast(self, t: Tensor) -> tuple[_Known, Tensor] | None:
        """The same for a cast of a result, which from here on is a result itself."""
        cast = t if t._base is None else t._base
        node = cast.grad_fn
        if type(node).__name__ != "ToCopyBackward0" or cast._version or not _is_whole(cast):
            return None
        known = self.nodes.get(node.next_functions[0])
        y = None if known is None else known.ref()
        if y is None or known.current(y) is None or y.device != cast.device or y.shape != cast.shape:
            return None
        self.learn(cast, _Recipe(_cast, (y, cast.dtype), (cast,), cast.device))
        return self.find(t)

    def pack(self, t: Tensor) -> Any:
        if type(t) is not Tensor or t.layout is not torch.strided:  # parameters among others
            return self.keep(t, None)
        found = self.find(t) or self.find_cast(t)
        if found is not None:
            known, x = found
            if type(known.how) is _Recipe:
                if known.how.keep(self.pack):
                    return _Result(known.how, known.index, x, t)
            elif t is x:
                return known.how
        return self.keep(t, found)

    def keep(self, t: Tensor, found: tuple | None) -> Any:
        if self.outer is None:
            # A leaf as it is: engines exchange the values of parameters. Another without its history, which may end in
            # the very node that saves it.
            return t if t.is_leaf else t.detach(), t._version
        kept = _Elsewhere(self.outer[0](t), self.outer[1])
        if type(t) is Tensor and found is None:
            self.learn(t, kept)  # an op and the recipe of its result keep the same inputs
        return kept


def _is_whole(y: Tensor) -> bool:
    """Whether a tensor has a storage of its own, without gaps: every view of that is one of a tensor like it."""
    return 0 < y.numel() * y.element_size() == y.untyped_storage().nbytes() and y.layout is torch.strided


def _cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype)


def _block() -> _Block | None:
    """The block whose hooks torch calls now in this thread."""
    hooks = _innermost(True)
    block = None if hooks is None else getattr(hooks[0], "__self__", None)
    return block if type(block) is _Block else None


# --- for ops ---------------------------------------------------------------------------------------


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
            plain = inputs or not torch.is_grad_enabled()
            return function(*args) if plain else _in_graph(function, *args)
        results = function(*args)
        if (block := _block()) is not None and all(x is None or block.makes(x) for x in args[:inputs]):
            block.remember(results, function, args)
        return results

    return call


# --- public ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Keep nothing for backward that Tigon's ops make again cheaply, in this thread's forward passes in the block.

    Outputs of norms and gates, and heads that are normalised, then turned: layers that would save them save how to make
    them. Every gradient has the same bits. Backward may run anywhere. Saved-tensor hooks around the block keep what is
    left; those in it take what is saved under them. Under `torch.compile` the graph makes them again. Also a decorator.

    Raises:
        RuntimeError: torch is older than 2.8, or forbids saved-tensor hooks here. In backward, an input of such an op
            was written in place since.

    Source: recomputation, Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; of chosen
    ops, Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.

    Example:
        >>> x, norm, linear = torch.randn(2, 8, requires_grad=True), tigon.RMSNorm(8), torch.nn.Linear(8, 4)
        >>> with tigon.lean():
        ...     y = linear(norm(x))  # keeps x, and not what the norm gives
        >>> y.sum().backward()
    """
    global _open
    if torch.compiler.is_compiling():
        _open += 1
        try:
            yield
        finally:
            _open -= 1
        return
    if _innermost is None:
        raise RuntimeError(f"lean: needs torch 2.8 or later, got {torch.__version__}")
    outer = _innermost(True)
    owner = None if outer is None else outer[0]
    # In a block of its own, or where a checkpoint keeps nothing anyway, and counts what is saved.
    if _block() is not None or getattr(owner, "__module__", "") == "torch.utils.checkpoint":
        yield
        return
    block = _Block(outer)
    with _lock:
        _open += 1
    try:
        with saved_tensors_hooks(block.pack, _unpack):
            yield
    finally:
        block.known.clear()
        block.nodes.clear()
        with _lock:
            _open -= 1
