"""Private names of torch about FSDP2: which parameters a unit gathers, and the buffers that it gathers them into.

FSDP2 asks the local tensor of a sharded parameter for two functions, `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
If the tensor has them, as attributes or as methods, the first one returns what is gathered, and the second one makes
the gathered parameter of it. These two names are the extension point of FSDP2. FSDP2 reads them when it gathers a
parameter for the first time, and keeps the buffers from then on. To add or remove the functions later, the buffers have
to be dropped, for which torch has no public function.

FSDP2 reads the functions in two methods of a unit: `unshard` begins an all-gather, and `wait_for_unshard` ends it. A
forward, a backward, a prefetch and a call of `unshard` by the user all call these two.

All names were seen in 2.13. Without one of them, `tigon.gather_in_fp8` refuses to run with one clear error.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Unit",
    "find_parameters",
    "find_units",
    "gathered_dtype",
    "local_shard",
    "renew",
    "surround_gathers",
    "why_not_extensible",
]

# A unit of FSDP2: the parameters that one all-gather collects. Its class, `FSDPParamGroup`, is private.
Unit = Any
# A function that returns the context in which a method runs.
Context = Callable[[], contextlib.AbstractContextManager]

# The methods of a unit in which FSDP2 reads the extension functions of its parameters.
_GATHER_METHODS = "unshard", "wait_for_unshard"
# The attributes of a unit and of one of its parameters that this file reads.
_UNIT_NAMES = (
    *("fsdp_params", "modules", "is_sharded", "_all_gather_result", "_use_post_forward_mesh"),
    *_GATHER_METHODS,
)
_PARAMETER_NAMES = (
    *("all_gather_outputs", "unsharded_accumulated_grad", "_unsharded_inner_tensors", "_init_extensions"),
    *("_sharded_local_tensor", "sharded_param", "offload_to_cpu", "is_dtensor", "mp_policy", "_module_info"),
)


def _require(owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which tigon.gather_in_fp8 needs; "
                "docs/versions.md lists the versions that work"
            )


def find_units(model: nn.Module) -> list[Unit]:
    """Return the units of all modules of a model that `fully_shard` has sharded, in the order of the modules.

    Raises:
        RuntimeError: This torch lacks one of the names.
    """
    # An engine that was never imported has sharded nothing.
    sharded_class = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded_class is None:
        return []
    units: dict[int, Unit] = {}
    module: Any
    for module in model.modules():
        if not isinstance(module, sharded_class):
            continue
        _require(module, ("_get_fsdp_state",))
        state = module._get_fsdp_state()
        # Versions before 2.12 have one unit for each state.
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
        for unit in groups:
            if unit is not None:
                _require(unit, _UNIT_NAMES)
                # Several modules may share a state.
                units.setdefault(id(unit), unit)
    for unit in units.values():
        for parameter in unit.fsdp_params[:1]:
            _require(parameter, _PARAMETER_NAMES)
    return [*units.values()]


def find_parameters(unit: Unit) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield a module, the name in this module, and FSDP2's record of each parameter of a unit.

    A parameter that several modules share is yielded for each of them.
    """
    for parameter in unit.fsdp_params:
        info = parameter._module_info
        yield info.module, info.param_name, parameter
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            yield module, name, parameter


def local_shard(parameter: Any) -> Tensor:
    """Return the tensor object that FSDP2 asks for its extension functions: the shard of this rank, without padding.

    `DTensor.to_local` may return another object with the same memory.
    """
    return parameter._sharded_local_tensor


def gathered_dtype(parameter: Any) -> torch.dtype:
    """Return the dtype that a gathered parameter has in forward."""
    return parameter.mp_policy.param_dtype or parameter.sharded_param.dtype


def why_not_extensible(unit: Unit, parameter: Any) -> str | None:
    """Return why the extension functions cannot gather a parameter, or None if they can."""
    if parameter.is_dtensor:
        return "tensor parallelism computes its products"
    if parameter.offload_to_cpu:
        return "its shard is in the memory of the host (CPUOffloadPolicy)"
    if unit._use_post_forward_mesh:
        return "it is resharded to some of the ranks after forward (reshard_after_forward is a number)"
    if parameter._module_info.shared_modules:
        return "several modules share it"
    return None


def renew(unit: Unit, parameter: Any) -> None:
    """Let FSDP2 look for the extension functions of a parameter again, and drop the buffers that it gathered into.

    A gradient that is not reduced yet, because gradients accumulate over several backwards, is kept.

    Raises:
        RuntimeError: The parameter is gathered at this moment.
    """
    if not unit.is_sharded or unit._all_gather_result is not None:
        raise RuntimeError("tigon.gather_in_fp8: weights are gathered at this moment; call it between two steps")
    if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
        if parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_accumulated_grad = gathered.grad
        del parameter._unsharded_param
    parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
    parameter._init_extensions()


class _SurroundedMethod:
    """A method of a unit that runs in a context. It keeps no strong reference to the unit, which holds it."""

    def __init__(self, unit: Unit, name: str, make_context: Context) -> None:
        self.unit, self.name, self.make_context = weakref.ref(unit), name, make_context
        # Another library may have put its own function in the place of the method of the class.
        self.replacement: Callable | None = vars(unit).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit()
        method = self.replacement or getattr(type(unit), self.name).__get__(unit)
        with self.make_context():
            return method(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there before. A wrapper that was put around this one meanwhile stays, and calls it."""
        self.make_context = contextlib.nullcontext
        unit = self.unit()
        if unit is None or vars(unit).get(self.name) is not self:
            return
        if self.replacement is None:
            delattr(unit, self.name)
        else:
            setattr(unit, self.name, self.replacement)


def surround_gathers(unit: Unit, make_context: Context) -> Callable[[], None]:
    """Run everything in which FSDP2 reads the extension functions of a unit in a context.

    Args:
        unit: The unit.
        make_context: Returns the context. It is called when an all-gather begins, and again when its result is needed.

    Returns:
        A function that ends this.
    """
    methods = [_SurroundedMethod(unit, name, make_context) for name in _GATHER_METHODS]
    for method in methods:
        setattr(unit, method.name, method)

    def end() -> None:
        for method in methods:
            method.remove()

    return end
