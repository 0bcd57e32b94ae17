"""Private names of torch about devices, operators, optimizers, process groups and profiles."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.runtime.compat.names import find

_C = torch._C


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

# The number of active function modes, which see and may replace each call of a function of torch. While there is one,
# probes run within a device context. Seen in 2.8 to 2.13. Without it: 1, so this is always so.
function_modes: Callable[[], int] = getattr(_C, "_len_torch_function_stack", lambda: 1)

# The list of the active function modes, and the module of the mode that chooses the device of new tensors, which torch
# imports when it needs this mode. Seen in 2.8 to 2.13. Without one of them: every mode may change results, so adapters
# run in eager code while one is active.
_list_function_modes: Any = getattr(torch.overrides, "_get_current_function_mode_stack", None)
_MODULE_OF_DEVICE_MODE = "torch.utils._device"


def any_changing_mode() -> bool:
    """Return whether a function mode is active, apart from those of `torch.set_default_device` and `torch.device`."""
    if not function_modes():
        return False
    if _list_function_modes is None:
        return True
    return any(type(mode).__module__ != _MODULE_OF_DEVICE_MODE for mode in _list_function_modes())


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator of torch, which names its arguments and their types; None if it has none.
    Higher-order operators have none. The attribute `_schema` was seen in 2.8 to 2.13. Without it, `symbolic_tools`
    refuses to run, and `tigon plan` counts more traffic."""
    return getattr(operator, "_schema", None)


def is_in_place(operator: Any) -> bool:
    """Return whether an operator of torch, such as `torch.ops.aten.add_.Tensor`, writes to one of its arguments."""
    return getattr(schema_of(operator), "is_mutable", True)


# Operators that `tigon plan` counts in a special way, or None: the matrix products of groups, and the copy of one value
# to the host. Seen in 2.8 to 2.13. Without them: the products are counted as traffic, and a model that reads such a
# value cannot be planned.
grouped_mm: Any = getattr(torch.ops.aten, "_grouped_mm", None)
read_scalar: Any = getattr(torch.ops.aten, "_local_scalar_dense", None)

# A reshape without a copy whose result autograd does not treat as a view, because a view that a node returns together
# with other outputs may not be overwritten. Seen in 2.8 to 2.13. Without it: a copy.
reshape_without_view: Callable[..., Tensor] = getattr(
    torch.ops.aten, "_unsafe_view", lambda x, shape: x.view(shape).clone()
)

# The built-in function behind `F.linear`. A comparison with it shows whether a library has replaced `F.linear`. Seen in
# 2.8 to 2.13. Without it: `F.linear` counts as replaced, so projections are called one by one.
native_linear: Any = getattr(getattr(_C, "_nn", None), "linear", None)

# The types of `torch.ops` and of a namespace in it. They are taken from values, because their names are private.
NAMESPACE_TYPES = type(torch.ops), type(torch.ops.aten)


# Add a number to many tensors in few launches. Seen in 2.8 to 2.13. Without it: one launch for each tensor.
increment: Callable[[list[Tensor], float], Any] = getattr(
    torch, "_foreach_add_", lambda tensors, value: [x.add_(value) for x in tensors]
)


def process_group_of(name: str) -> Any:
    """Return the process group with a name. Operators take the name, because a group cannot be their argument. Seen in
    2.8 to 2.13. Without it, a loss with a sharded vocabulary refuses to run."""
    return _resolve(name)


_resolve: Any = find("distributed.distributed_c10d._resolve_process_group") if dist.is_available() else None
