"""Private names of torch about autograd: backward, saved tensors, hooks of gradients, storages, function modes."""

import functools
import operator
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from tigon.runtime.compat.names import find

_C = torch._C


# True if the running backward retains its graph. Saved tensors may be overwritten only if it does not. Seen in 2.8 to
# 2.13. Without it: True, so gradients are written into new memory.
keeps_graph: Callable[[], bool] = getattr(_C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

# A number of the running backward, or -1 outside of any. Seen in 2.8 to 2.13. Without it: `accumulate_grad` and the
# levels of memory with `offload` refuse to run.
backward_id: Callable[[], int] = find("_C._current_graph_task_id")

# True in a block of autocast for any device. This call takes a tenth of the time of the search for a tensor's device,
# which matters for small models, whose steps are bound by the host. Seen in 2.8 to 2.13. Without it: that search.
is_any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", lambda: True)

# The innermost hooks of `torch.autograd.graph.saved_tensors_hooks` in this thread, as (pack, unpack), or None. The
# argument is True. Seen in 2.8 to 2.13; 2.7 has none. Without it: `tigon.lean` refuses to run, and ops assume that
# hooks of other libraries receive their saved tensors, so they overwrite none of these tensors.
_foreign_hooks = (lambda tensor: tensor, lambda tensor: tensor)
saved_tensor_hooks: Callable[[bool], tuple[Callable, Callable] | None] = find(
    "_C._autograd._top_saved_tensors_default_hooks", lambda ignored: _foreign_hooks
)


_exclude_key: Callable[[Any, bool], Any] = find("_C._SetExcludeDispatchKeyGuard")


def shared_versions() -> Any:
    """Return a block in which `x.detach()` shares the version of `x`, also in the handler of a dispatch mode. A handler
    runs without the dispatch key that gives a view the version counter of its base. Torch's checkpoint does the same
    where it saves the results of operators. Seen in 2.8 to 2.13. Without it: a RuntimeError."""
    return _exclude_key(torch._C.DispatchKey.ADInplaceOrView, False)


def _pack_hook_name(owner: str) -> str | None:
    """Return the qualified name of the function `pack_hook` that a class of `torch.utils.checkpoint` defines."""
    init = getattr(getattr(torch.utils.checkpoint, owner, None), "__init__", None)
    constants = getattr(getattr(init, "__code__", None), "co_consts", ())
    codes = (x for x in constants if isinstance(x, types.CodeType))
    return next((code.co_qualname for code in codes if code.co_name == "pack_hook"), None)


# The hooks of the first run of a checkpointed region, and those of its recomputation, are local functions of two
# private classes. Seen in 2.8 to 2.13. Both names are looked up in torch's code rather than assumed: if one of them
# changes, both count as unknown and a warning says so, because knowing only one would let the backward of `glu_mlp`
# overwrite tensors that a recomputation shares with it. Without them: checkpointed regions count as foreign hooks.
_FIRST_RUN, _RECOMPUTE = _pack_hook_name("_checkpoint_hook"), _pack_hook_name("_recomputation_hook")
_KNOWS_CHECKPOINT = _FIRST_RUN is not None and _RECOMPUTE is not None
if not _KNOWS_CHECKPOINT:
    warnings.warn(
        f"tigon: torch {torch.__version__} names the hooks of torch.utils.checkpoint in another way than torch 2.8 to "
        "2.13. "
        "Checkpointed MLPs therefore keep more memory, and changes of a checkpointed layer between its two runs are "
        "not noticed.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_checkpoint_hook(pack: Callable) -> bool:
    """Return whether a pack hook belongs to a non-reentrant checkpoint, in its first run or its recomputation."""
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint" and _KNOWS_CHECKPOINT


def is_recompute_hook(pack: Callable) -> bool:
    """Return whether a pack hook belongs to the recomputation of a non-reentrant checkpoint."""
    if not is_checkpoint_hook(pack):
        return False
    name = getattr(pack, "__qualname__", "")
    if name not in (_FIRST_RUN, _RECOMPUTE):
        raise RuntimeError(
            f"tigon: torch {torch.__version__} saves tensors of a checkpointed region by {name!r}, which Tigon does "
            "not know; docs/compatibility.md lists the versions that work"
        )
    return name == _RECOMPUTE


def _node_types() -> tuple[type, type]:
    """Return the types of the autograd nodes of a cast and of a leaf, from a cast of a leaf."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True).to(torch.float64).grad_fn
    assert node is not None
    return type(node), type(node.next_functions[0][0])


# The autograd nodes of a cast and of a leaf: `tigon.lean` recomputes casts, and keeps weights and their casts on the
# device. The types are taken from a cast, not from the names "ToCopyBackward0" and "AccumulateGrad" that they have in
# 2.8 to 2.13, so a new name changes nothing.
CastBackward, AccumulateGrad = _node_types()

# Run backward inside the active modes, which recomputed layers need and `Tensor.backward` would leave. Seen in 2.8 to
# 2.13. Without it, `tigon plan` refuses to run.
engine_run_backward: Callable[..., Any] = find("autograd.graph._engine_run_backward")


def has_gradient_hooks(x: Tensor) -> bool:
    """Return whether autograd calls hooks with the gradient of x, or after it has accumulated the gradient. torch keeps
    them in two private attributes, seen in 2.8 to 2.13. If one of them is missing the answer is True, so the caller
    refuses to bypass autograd."""
    return any(getattr(x, name, True) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


# The address of the storage object. Tensors have the same address if and only if they share memory; unlike
# `data_ptr()`, this holds for meta tensors too. Seen in 2.8 to 2.13. Without it: `tigon.lean` and `tigon plan` refuse
# to run.
if hasattr(torch.UntypedStorage, "_cdata"):
    storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
else:
    storage_id = find("UntypedStorage._cdata")


transforms_are_active: Callable[[], bool] = find("_C._are_functorch_transforms_active", lambda: True)


def apply_without_transforms(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `cls.apply` for calls outside of the transforms of `torch.func`. The class above `Function` has this
    `apply`. That of `Function` looks for transforms, and unwraps each argument that a transform has returned, which
    takes a third of the time of a call. Seen in 2.8 to 2.13. Without it: that of `Function`."""
    missing = functools.partial(torch.autograd.Function.apply.__func__, cls)  # type: ignore[attr-defined]
    return getattr(super(torch.autograd.Function, cls), "apply", missing)


# This call only records the name if it is missing.
find("autograd.forward_ad._current_level", -1)


def has_active_transform() -> bool:
    """Return whether a transform of `torch.func` or a level of forward-mode derivatives is active. These work only on
    torch's own operators, so the loss in the head is stock then. Seen in 2.8 to 2.13. Without one of the two names, the
    loss stays stock, and the report of `tigon.patch` names what is missing."""
    return transforms_are_active() or torch.autograd.forward_ad._current_level >= 0


# A block in which tensor subclasses are treated as plain tensors: the placeholder for logits uses it, because
# torch.compile supports no other conversion. Seen in 2.8 to 2.13. Without it, the loss stays stock, as above.
DisableTorchFunctionSubclass: Any = find("_C.DisableTorchFunctionSubclass")

# A block without function modes: the ledger of `tigon plan` uses it. Seen in 2.8 to 2.13. Without it, `tigon plan`
# refuses to run.
DisableTorchFunction: Any = find("_C.DisableTorchFunction")
