"""Private names of torch about modules: their calls, hooks and copies."""

from typing import Any

from torch import nn

# The attributes that every module has: its tables of parameters, buffers, children and hooks, and its mode.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

# The tables of a module that hold hooks of its call. A call reads all of them, so torch cannot rename one of them
# without breaking the modules that were pickled before.
HOOK_TABLES = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


# The attributes of an instance that its call looks up and that hold no forward. Seen in 2.8 to 2.13. A torch that looks
# none of them up ignores them, so watching them is harmless there.
INSTANCE_CALLS = CALL_IMPL, COMPILED_CALL_IMPL = "_call_impl", "_compiled_call_impl"

# The function that `module(x)` runs: it calls the hooks and the forward. A replaced one may do anything. Seen in 2.8 to
# 2.13. Without it: no call counts as torch's own, so every module whose replacement depends on this check stays stock.
call_impl: Any = getattr(nn.Module, CALL_IMPL, None)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs a hook of it. A loop over `HOOK_TABLES` would take four times as long."""
    tables = module.__dict__
    forward_hooks = tables["_forward_hooks"] or tables["_forward_pre_hooks"]
    return bool(forward_hooks or tables["_backward_hooks"] or tables["_backward_pre_hooks"])


_KINDS = "forward_pre", "forward", "backward_pre", "backward"
# The tables of hooks that are registered for every module, which a fused part would not call. torch keeps them in four
# private dicts, seen in 2.8 to 2.13. If one of them is missing, `any(GLOBAL_HOOKS)` is True, so parts that skip a
# module's call stay stock.
GLOBAL_HOOKS: tuple[Any, ...] = tuple(
    getattr(nn.modules.module, f"_global_{kind}_hooks", "unknown hooks") for kind in _KINDS
)


def any_global_hook() -> bool:
    """Return whether a hook is registered for every module."""
    return any(GLOBAL_HOOKS)


# The method by which `nn.DataParallel` copies a module to another device. Seen in 2.8 to 2.13. Without it: a copy has
# the forward of the module that it was copied from, so its call raises torch's error about tensors on two devices.
REPLICATE = "_replicate_for_data_parallel"


def is_replica(module: nn.Module) -> bool:
    """Return whether a module is a copy that `nn.DataParallel` made for one call on another device. Seen in 2.8 to
    2.13. Without the attribute, `nn.DataParallel` raises TypeError when it gathers skipped logits."""
    return getattr(module, "_is_replica", False)
