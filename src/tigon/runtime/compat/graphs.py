"""Private names of torch about graphs: runs with symbolic sizes, and guards of the graphs of `torch.compile`."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tigon.runtime.compat.operators import schema_of

# The base class of modes that see every operator. Seen in 2.8 to 2.13. Without it: `symbolic_tools` raises an error.
try:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
except ImportError:
    DispatchMode = object  # type: ignore[assignment, misc]


# The first part of the names of the modules whose functions call a compiled graph.
CALLER_OF_GRAPHS = "torch._functorch._aot_autograd."


class TransparentMode(DispatchMode):
    """A mode that sees every operator, and in which torch.compile goes on to compile functions. In other modes,
    torch.compile runs functions without compiling them. Torch asks the first method for this from 2.9 on, and the
    second one before. Higher-order operators reach the mode; torch 2.8 refuses them in any mode."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return not hasattr(DispatchMode, "ignore_compile_internals")


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
    shows this error."""
    try:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} cannot run symbolic sizes ({error})") from error
    if DispatchMode is object:
        raise RuntimeError(f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode")
    if schema_of(torch.ops.aten.add.Tensor) is None:
        raise RuntimeError(f"the operators of torch {torch.__version__} have no _schema")
    environment = _with_quick_frames(ShapeEnv)
    return SymbolicTools(environment, FakeTensorMode, StatelessSymbolicContext, DimDynamic, enable_python_dispatcher)


# The modules of torch that record a guard. The code that decides by a size is in the first frame outside of them.
RECORDERS_OF_GUARDS = {
    "torch",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.meta_utils",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
}


@functools.cache
def _with_quick_frames(shape_env: type) -> type:
    """Return a subclass of ShapeEnv that records the same guards, and finds their places in the code without imports.
    At the first guard, ShapeEnv itself imports Inductor, torch.export and networkx, which takes 0.7 s, only to list the
    files that are no places of guards. The private method was seen in 2.13. Without it, the imports take place."""

    class QuickShapeEnv(shape_env):
        def _get_user_frame(self) -> types.FrameType | None:
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None:
                is_generated = frame.f_code.co_filename == "<string>"
                if not is_generated and frame.f_globals.get("__name__") not in RECORDERS_OF_GUARDS:
                    break
                frame = frame.f_back
            return frame

    return QuickShapeEnv


def storage_users(storage: StorageWeakRef) -> int:
    """Return how many tensors and other objects refer to a storage, for a `StorageWeakRef` of it. The private function
    was seen in 2.8 to 2.13. Without it, the answer is 2: something else may refer to the storage."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 2 if count is None else count(storage.cdata) - _references_of_count()


@functools.cache
def _references_of_count() -> int:
    """Return how many references the private function itself adds, which differs between releases."""
    tensor = torch.empty(1, device="cpu")
    return torch._C._storage_Use_Count(StorageWeakRef(tensor.untyped_storage()).cdata) - 1


def has_storage(tensor: Tensor, storage: StorageWeakRef) -> bool:
    """Return whether a tensor has a storage. The attribute `_cdata` was seen in 2.8 to 2.13; `lean` needs it too."""
    return tensor.untyped_storage()._cdata == storage.cdata


def end_allocation(device: torch.device, pool: Any) -> None:
    """Let new tensors lie outside of a pool again, after a capture that failed. Seen in 2.8 to 2.13. Without the
    private function, the allocator caches less memory from then on."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        end(device.index, pool)


# Keep `torch.compile` out of a method. Unlike `torch.compiler.disable` it does not import Dynamo, which takes seconds,
# before the method is called. Seen in 2.8 to 2.13. Without it: the public function.
disable_dynamo: Callable[[Callable], Callable] = getattr(torch, "_disable_dynamo", torch.compiler.disable)

# Dynamo, the tracer of torch.compile, guards only what it traces. Tigon adds one guard to a graph, by the names below,
# all seen in 2.8 to 2.13. If one of them is missing or takes other arguments, the graph contains the stock forward,
# which Dynamo guards itself.

# The errors that these names raise in a torch that lacks one of them, or in which it takes other arguments.
DYNAMO_ERRORS = (AttributeError, ImportError, KeyError, TypeError)


def load_comptime() -> Callable[[Callable[[Any], None]], None]:
    """Return Dynamo's `comptime`: a call of it in traced code runs a function while Dynamo traces. This imports Dynamo,
    which takes seconds."""
    try:
        from torch._dynamo.comptime import comptime
    except ImportError:
        return lambda function: None
    return comptime


try:
    from torch._guards import TracingContext as _TracingContext
except ImportError:
    _TracingContext = None  # type: ignore[assignment, misc]


def is_tracing() -> bool:
    """Return True in Python code that Dynamo runs, instead of tracing it, while it traces a graph. Without the private
    class, the answer is that of the public `torch.compiler.is_compiling`."""
    if _TracingContext is None:
        return torch.compiler.is_compiling()
    return _TracingContext.try_get() is not None


def locals_of_caller(context: Any, *names: str) -> tuple[Any, list[Any]]:
    """Return the traced frame that called the function with the `comptime` call, and Dynamo's variables of these names.
    The attribute `value` of a variable is the real object, and `source` says how the graph reaches this object."""
    frame = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().parent
    return frame, [frame.symbolic_locals[name].realize() for name in names]


def changed_objects(frame: Any) -> tuple[set[int], bool]:
    """Return the ids of the objects that the traced code has changed so far, and whether it has changed a global.
    Dynamo lists existing objects under their own ids, and assignments to globals under other ids."""
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
