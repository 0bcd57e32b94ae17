"""Every private or undocumented name of torch that Tigon needs to run a model, in one place.

Each name states why it is needed, the versions of torch that it was seen in, and what happens without it: another way
that is slower or takes more memory, or one clear refusal. `tests/runtime/test_torch_private.py` tests the behaviour of
each name, so that it names what is different in a new version of torch.

The names are bound once, at import, because small models wait for the host.
"""

import importlib
import inspect
import operator
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

__all__ = [
    "NAMES_FOR_LEAN",
    "NAMES_FOR_LOSS",
    "NAMES_FOR_OFFLOAD",
    "NAMES_FOR_PLAN",
    "AccumulateGrad",
    "CastBackward",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "StorageWeakRef",
    "any_global_hook",
    "assert_on_device",
    "backward_id",
    "current_device",
    "current_raw_stream",
    "disable_dynamo",
    "dispatch_modes",
    "engine_run_backward",
    "grouped_mm",
    "has_active_transform",
    "has_gradient_hooks",
    "has_init_group",
    "increment",
    "is_checkpoint_hook",
    "is_in_place",
    "is_recompute_hook",
    "is_replica",
    "keeps_graph",
    "process_group_of",
    "read_scalar",
    "require",
    "reshape_without_view",
    "saved_tensor_hooks",
    "storage_id",
]

_C = torch._C
_missing: dict[str, str] = {}


def _refusal(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises the refusal of whatever needs the missing name."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(_missing[name])

    return refuse


def _find(path: str, default: Any = None) -> Any:
    """Return `torch.<path>`. If this torch has none, record its name for `require` and return the default.

    Without a default, the result is a function that raises a RuntimeError which names the missing function.
    """
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    if value is not None:
        return value
    _missing[path] = (
        f"torch {torch.__version__} has no torch.{path}, which Tigon needs here; "
        "docs/versions.md lists the versions that work"
    )
    return _refusal(path) if default is None else default


# The names without which a feature refuses to run; see `require`.
NAMES_FOR_LEAN = "_C._autograd._top_saved_tensors_default_hooks", "UntypedStorage._cdata"
NAMES_FOR_OFFLOAD = "_C._current_graph_task_id", "multiprocessing.reductions.StorageWeakRef"


def require(user: str, *paths: str) -> None:
    """Refuse a feature, before it computes anything, if this torch lacks one of the names that the feature needs.

    Raises:
        RuntimeError: One of `torch.<path>` is missing. The message names the feature and the missing name.
    """
    for path in paths:
        if path in _missing:
            raise RuntimeError(f"{user}: {_missing[path]}")


# --- the device ------------------------------------------------------------------------------------

# The number of the current stream of a device: every launch needs it, and a `torch.cuda.Stream` object takes 1 us.
# Seen in 2.8 to 2.13, in builds with CUDA. Without it: the object.
current_raw_stream: Callable[[int], int] = getattr(
    _C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)

# The current device, without the lazy initialisation of `torch.cuda.current_device`. Called only with a CUDA tensor at
# hand. Seen in 2.8 to 2.13, in builds with CUDA. Without it: the public function.
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)

# The number of active dispatch modes, which count, fake or cache the operators of torch. cuBLASLt and the self-check of
# launches do not run inside them. Seen in 2.8 to 2.13. Without it: 1, so cuBLASLt is not used and no launch is direct.
dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)

# --- autograd --------------------------------------------------------------------------------------

# True if the running backward retains its graph. Saved tensors may be overwritten only if it does not. Seen in 2.8 to
# 2.13. Without it: True, so gradients are written into new memory.
keeps_graph: Callable[[], bool] = getattr(_C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

# A number of the running backward, or -1 outside of any. Seen in 2.8 to 2.13. Without it: `accumulate_grad` and
# `tigon.lean(offload=True)` refuse to run.
backward_id: Callable[[], int] = _find("_C._current_graph_task_id")

# The innermost hooks of `torch.autograd.graph.saved_tensors_hooks` in this thread, as (pack, unpack), or None. The
# argument is True. Seen in 2.8 to 2.13; 2.7 has none. Without it: `tigon.lean` refuses to run, and ops assume that
# hooks of other libraries receive their saved tensors, so they overwrite none of these tensors.
_foreign_hooks = (lambda tensor: tensor, lambda tensor: tensor)
saved_tensor_hooks: Callable[[bool], tuple[Callable, Callable] | None] = _find(
    "_C._autograd._top_saved_tensors_default_hooks", lambda ignored: _foreign_hooks
)


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
    """Return whether a pack hook belongs to the recomputation of a non-reentrant checkpoint.

    Raises:
        RuntimeError: The hook is one of `torch.utils.checkpoint` that is neither of the two known ones.
    """
    if not is_checkpoint_hook(pack):
        return False
    name = getattr(pack, "__qualname__", "")
    if name not in (_FIRST_RUN, _RECOMPUTE):
        raise RuntimeError(
            f"tigon: torch {torch.__version__} saves tensors of a checkpointed region by {name!r}, which Tigon does "
            "not know; docs/versions.md lists the versions that work"
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

# --- storages --------------------------------------------------------------------------------------

# The address of the storage object. Tensors have the same address if and only if they share memory; unlike
# `data_ptr()`, this holds for meta tensors too. Seen in 2.8 to 2.13. Without it: `tigon.lean` and `tigon plan` refuse
# to run.
if hasattr(torch.UntypedStorage, "_cdata"):
    storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
else:
    storage_id = _find("UntypedStorage._cdata")

# A reference that keeps the address of a storage from being used again, but not its memory. Seen in 2.8 to 2.13.
# Without it: `tigon.lean(offload=True)` refuses to run.
StorageWeakRef: Any
try:
    StorageWeakRef = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
except (ImportError, AttributeError):
    StorageWeakRef = _find("multiprocessing.reductions.StorageWeakRef")

# --- transforms, placeholders, counted steps -------------------------------------------------------

_transforms_are_active = _find("_C._are_functorch_transforms_active", lambda: True)
_find("autograd.forward_ad._current_level", -1)


def has_active_transform() -> bool:
    """Return whether a transform of `torch.func` or a level of forward-mode derivatives is active.

    These work only on torch's own operators, so the loss in the head is stock then. Seen in 2.8 to 2.13. Without one of
    the two names, the loss stays stock, and the report of `tigon.patch` names what is missing.
    """
    return _transforms_are_active() or torch.autograd.forward_ad._current_level >= 0


# A block in which tensor subclasses are treated as plain tensors: the placeholder for logits uses it, because
# torch.compile supports no other conversion. Seen in 2.8 to 2.13. Without it, the loss stays stock, as above.
DisableTorchFunctionSubclass: Any = _find("_C.DisableTorchFunctionSubclass")

# A block without function modes: the ledger of `tigon plan` uses it. Seen in 2.8 to 2.13. Without it, `tigon plan`
# refuses to run.
DisableTorchFunction: Any = _find("_C.DisableTorchFunction")

# Assert a tensor on its device, without a host synchronisation. Seen in 2.8 to 2.13. Without it: no assertion, so a
# loss whose logits were changed is NaN, as on devices without assertions in kernels.
assert_on_device: Callable[[Tensor, str], Any] = getattr(torch, "_assert_async", lambda condition, message: None)


def is_replica(module: nn.Module) -> bool:
    """Return whether a module is a copy that `nn.DataParallel` made for one call on another device.

    Seen in 2.8 to 2.13. Without the attribute, `nn.DataParallel` raises TypeError when it gathers skipped logits.
    """
    return getattr(module, "_is_replica", False)


# Run backward inside the active modes, which recomputed layers need and `Tensor.backward` would leave. Seen in 2.8 to
# 2.13. Without it, `tigon plan` refuses to run.
engine_run_backward: Callable[..., Any] = _find("autograd.graph._engine_run_backward")

# The names without which a feature refuses to run; see `require`.
NAMES_FOR_LOSS = (
    "_C._are_functorch_transforms_active",
    "autograd.forward_ad._current_level",
    "_C.DisableTorchFunctionSubclass",
)
NAMES_FOR_PLAN = "_C.DisableTorchFunction", "autograd.graph._engine_run_backward", "UntypedStorage._cdata"


def is_in_place(operator: Any) -> bool:
    """Return whether an operator of torch, such as `torch.ops.aten.add_.Tensor`, writes to one of its arguments.

    Its schema says so: `_schema`, seen in 2.8 to 2.13. Without it: True, so `tigon plan` counts more traffic.
    """
    return getattr(getattr(operator, "_schema", None), "is_mutable", True)


# Operators that `tigon plan` counts in a special way, or None: the matrix products of groups, and the copy of one value
# to the host. Seen in 2.8 to 2.13. Without them: the products are counted as traffic, and a model that reads such a
# value cannot be planned.
grouped_mm: Any = getattr(torch.ops.aten, "_grouped_mm", None)
read_scalar: Any = getattr(torch.ops.aten, "_local_scalar_dense", None)

# --- modules, optimizers, operators ----------------------------------------------------------------

_KINDS = "forward_pre", "forward", "backward_pre", "backward"
_GLOBAL_HOOKS = tuple(getattr(nn.modules.module, f"_global_{kind}_hooks", None) for kind in _KINDS)
_KNOWS_GLOBAL_HOOKS = None not in _GLOBAL_HOOKS


def has_gradient_hooks(x: Tensor) -> bool:
    """Return whether autograd calls hooks with the gradient of x, or after it has accumulated the gradient.

    torch keeps them in two private attributes, seen in 2.8 to 2.13. If one of them is missing the answer is True, so
    the caller refuses to bypass autograd.
    """
    return any(getattr(x, name, True) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def any_global_hook() -> bool:
    """Return whether a hook is registered for every module, which a fused part would not call.

    torch keeps these hooks in four private dicts, seen in 2.8 to 2.13. If one of them is missing the answer is True, so
    parts that skip a module's call stay stock.
    """
    return any(_GLOBAL_HOOKS) if _KNOWS_GLOBAL_HOOKS else True


# Keep `torch.compile` out of a method. Unlike `torch.compiler.disable` it does not import Dynamo, which takes seconds,
# before the method is called. Seen in 2.8 to 2.13. Without it: the public function.
disable_dynamo: Callable[[Callable], Callable] = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def has_init_group() -> bool:
    """Return whether `torch.optim.AdamW` fills six lists in `_init_group`, where Tigon's step takes place.

    Seen in 2.8 to 2.13; 2.6 has other parameters. Otherwise `tigon.AdamW` is torch's optimizer.
    """
    lists = ["params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    method = getattr(torch.optim.AdamW, "_init_group", None)
    return method is not None and list(inspect.signature(method).parameters) == ["self", "group", *lists]


def _increment_one_by_one(tensors: list[Tensor], value: float) -> None:
    for x in tensors:
        x.add_(value)


# Add a number to many tensors in few launches. Seen in 2.8 to 2.13. Without it: one launch for each tensor.
increment: Callable[[list[Tensor], float], Any] = getattr(torch, "_foreach_add_", _increment_one_by_one)

# A reshape without a copy whose result autograd does not treat as a view, because a view that a node returns together
# with other outputs may not be overwritten. Seen in 2.8 to 2.13. Without it: a copy.
reshape_without_view: Callable[..., Tensor] = getattr(
    torch.ops.aten, "_unsafe_view", lambda x, shape: x.view(shape).clone()
)


def process_group_of(name: str) -> Any:
    """Return the process group with a name. Operators take the name, because a group cannot be their argument.

    Seen in 2.8 to 2.13. Without it, a loss whose vocabulary is sharded refuses to run.
    """
    return _resolve(name)


_resolve: Any = _find("distributed.distributed_c10d._resolve_process_group") if dist.is_available() else None


# --- recognition -----------------------------------------------------------------------------------

__all__ += [
    "DYNAMO_ERRORS",
    "INSTANCE_CALLS",
    "NAMESPACE_TYPES",
    "OPERATOR_TYPES",
    "DispatchMode",
    "SymbolicTools",
    "add_lambda_guard",
    "call_impl",
    "changed_objects",
    "global_source",
    "install_guard",
    "is_tracing",
    "load_comptime",
    "locals_of_caller",
    "native_linear",
    "operator_namespaces",
    "symbolic_tools",
]

# The function that `module(x)` runs: it calls the hooks and the forward. A replaced one may do anything. Seen in 2.8 to
# 2.13. Without it: no call counts as torch's own, so every module whose replacement depends on this check stays stock.
call_impl: Any = getattr(nn.Module, "_call_impl", None)

# The attributes of an instance that its call looks up and that hold no forward. Seen in 2.8 to 2.13. A torch that looks
# none of them up ignores them, so watching them is harmless there.
INSTANCE_CALLS = "_call_impl", "_compiled_call_impl"

# The built-in function behind `F.linear`. A comparison with it shows whether a library has replaced `F.linear`. Seen in
# 2.8 to 2.13. Without it: `F.linear` counts as replaced, so projections are called one by one.
native_linear: Any = getattr(getattr(_C, "_nn", None), "linear", None)

# The types of `torch.ops`, of a namespace in it, of an operator and of one of its overloads. They are taken from
# values, because their names, `torch._ops.OpOverload` among them, are private.
NAMESPACE_TYPES = type(torch.ops), type(torch.ops.aten)
OPERATOR_TYPES = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)


def operator_namespaces() -> frozenset[str] | None:
    """Return the namespaces of all registered operators, such as "aten".

    Seen in 2.8 to 2.13. Without the private function, return None: a forward that uses `torch.ops` then stays stock.
    """
    names = getattr(_C, "_dispatch_get_all_op_names", None)
    return None if names is None else frozenset(name.partition("::")[0] for name in names())


# --- runs with symbolic sizes ------------------------------------------------------------------------

# The base class of modes that see every operator. Seen in 2.8 to 2.13. Without it: `symbolic_tools` refuses.
try:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
except ImportError:
    DispatchMode = object  # type: ignore[assignment, misc]


class SymbolicTools(NamedTuple):
    """The names of torch with which a forward runs on tensors without values, whose sizes are symbols."""

    ShapeEnv: Any
    FakeTensorMode: Any
    StatelessSymbolicContext: Any
    DimDynamic: Any
    enable_python_dispatcher: Any


def symbolic_tools() -> SymbolicTools:
    """Import the names for runs with symbolic sizes. They take a second to import, so they are imported when needed.

    Seen in 2.8 to 2.13. Without them, a module whose code can read the size of a tensor stays stock, and the report
    shows this error.

    Raises:
        RuntimeError: This torch lacks one of the names.
    """
    try:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} cannot run symbolic sizes ({error})") from error
    if DispatchMode is object:
        raise RuntimeError(f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode")
    return SymbolicTools(ShapeEnv, FakeTensorMode, StatelessSymbolicContext, DimDynamic, enable_python_dispatcher)


# --- guards of graphs --------------------------------------------------------------------------------

# Dynamo, the tracer of torch.compile, guards only what it traces. Tigon adds one guard to a graph, by the names below,
# all seen in 2.8 to 2.13. If one of them is missing or takes other arguments, the graph contains the stock forward,
# which Dynamo guards itself.

# The errors that these names raise in a torch that lacks one of them, or in which it takes other arguments.
DYNAMO_ERRORS = (AttributeError, ImportError, KeyError, TypeError)


def _run_nothing(function: Callable[[Any], None]) -> None:
    """Take the place of `comptime` in a torch without it."""


def load_comptime() -> Callable[[Callable[[Any], None]], None]:
    """Return Dynamo's `comptime`: a call of it in traced code runs a function while Dynamo traces.

    This imports Dynamo, which takes seconds.
    """
    try:
        from torch._dynamo.comptime import comptime
    except ImportError:
        return _run_nothing
    return comptime


try:
    from torch._guards import TracingContext as _TracingContext
except ImportError:
    _TracingContext = None  # type: ignore[assignment, misc]


def is_tracing() -> bool:
    """Return True in Python code that Dynamo runs, instead of tracing it, while it traces a graph.

    Without the private class, the answer is that of the public `torch.compiler.is_compiling`.
    """
    if _TracingContext is None:
        return torch.compiler.is_compiling()
    return _TracingContext.try_get() is not None


def locals_of_caller(context: Any, *names: str) -> tuple[Any, list[Any]]:
    """Return the traced frame that called the function with the `comptime` call, and Dynamo's variables of these names.

    The attribute `value` of a variable is the real object, and `source` says how the graph reaches this object.
    """
    frame = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().parent
    return frame, [frame.symbolic_locals[name].realize() for name in names]


def changed_objects(frame: Any) -> tuple[set[int], bool]:
    """Return the ids of the objects that the traced code has changed so far, and whether it has changed a global.

    Dynamo keeps objects that exist already under their ids, and assignments to globals under ids of its own.
    """
    effects = frame.output.side_effects
    changed = {key: variable for key, variable in effects.id_to_variable.items() if effects.is_modified(variable)}
    return set(changed), any(type(variable).__name__ == "NewGlobalVariable" for variable in changed.values())


def global_source(prefix: str, value: Any) -> Any:
    """Give an object a name among the globals of the graph that Dynamo traces now, and return Dynamo's source of it."""
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return GlobalSource(InstructionTranslator.current_tx().output.install_global_by_id(prefix, value))


def install_guard(source: Any, creator: Callable[[Any, Any], None]) -> None:
    """Add a guard to the graph that Dynamo traces now. Dynamo calls `creator(builder, guard)` once it is complete."""
    from torch._dynamo.guards import install_guard

    install_guard(source.make_guard(creator))


def add_lambda_guard(builder: Any, guard: Any, is_unchanged: Callable[[Any], bool], text: str) -> None:
    """Let the guards of a graph call a function of the guarded object. `text` names the guard in Dynamo's logs."""
    manager, words = builder.get_guard_manager(guard), [f"{text} ({guard.name})"]
    try:
        manager.add_lambda_guard(is_unchanged, words, guard.user_stack)
    except TypeError:
        # torch before 2.10 has no third argument.
        manager.add_lambda_guard(is_unchanged, words)
