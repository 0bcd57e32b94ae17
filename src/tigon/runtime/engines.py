"""Recognise the hooks and attributes that training engines put on modules and parameters.

An engine (FSDP, DeepSpeed, accelerate, tensor parallelism in transformers) registers hooks on modules, to gather and
shard parameters or to convert inputs and outputs. The Python module that defines a hook shows which engine the hook
belongs to. Two questions about a hook may have different answers, so each row of the table answers both:

- Does the hook keep the values of outputs and gradients? Then a recipe may replace the forward of its module.
- May the hook run a second time? Then backward may call its module again to recompute a projection.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from tigon.runtime.stock import origin_of


class HookOrigin(NamedTuple):
    """The hooks of Python modules whose names begin with `prefix`."""

    prefix: str
    keeps_values: bool
    may_run_twice: bool


# The first origin whose prefix matches is used.
HOOK_ORIGINS = (
    # FSDP, tensor and pipeline parallelism.
    HookOrigin("torch.distributed.", keeps_values=True, may_run_twice=True),
    # Observers of quantisation round the values that they see.
    HookOrigin("torch.ao.", keeps_values=False, may_run_twice=False),
    # Other hooks of torch, such as those of profilers, count calls or collect values, once for each call of the model.
    HookOrigin("torch.", keeps_values=True, may_run_twice=False),
    # ZeRO-3 gathers and releases parameters.
    HookOrigin("deepspeed.", keeps_values=True, may_run_twice=True),
    # accelerate moves inputs and parameters between devices.
    HookOrigin("accelerate.", keeps_values=True, may_run_twice=True),
    # Tensor and expert parallelism.
    HookOrigin("transformers.distributed.", keeps_values=True, may_run_twice=True),
    # NEFTune adds noise to the outputs of its module, usually the embedding of tokens.
    HookOrigin("transformers.integrations.neftune", keeps_values=False, may_run_twice=False),
    HookOrigin("transformers.integrations.", keeps_values=True, may_run_twice=True),
    # These hooks collect the outputs of layers (`output_hidden_states`), and have no effect after the model's call. A
    # replaced forward may not compute the output that they collect.
    HookOrigin("transformers.utils.output_capturing", keeps_values=False, may_run_twice=True),
)

# The attributes that accelerate sets on a module. `add_hook_to_module` sets the first two: the hook, and the forward
# that it wraps. `Accelerator.prepare` sets the third: the forward that it wraps for mixed precision. Seen in accelerate
# 1.14 and 1.15. A version of accelerate with other names counts as a library that has replaced the forward, so the
# module stays stock.
WRAPPER_ATTRIBUTES = WRAPPER_HOOK, WRAPPED_FORWARD, ORIGINAL_FORWARD = "_hf_hook", "_old_forward", "_original_forward"
# The attributes that may hold the forward that the author of the module wrote, or one that replaces it.
FORWARD_SLOTS = "forward", WRAPPED_FORWARD


def _find_origin(hook: Callable) -> HookOrigin | None:
    name = origin_of(hook)
    return next((origin for origin in HOOK_ORIGINS if name.startswith(origin.prefix)), None)


def keeps_values(hook: Callable) -> bool:
    """Return True if a hook is known to keep the values of outputs and gradients, as hooks of sharding engines do."""
    origin = _find_origin(hook)
    return origin is not None and origin.keeps_values


def may_run_twice(hook: Callable) -> bool:
    """Return True if a hook may run a second time in backward without an effect outside of the call."""
    origin = _find_origin(hook)
    return origin is not None and origin.may_run_twice


def forward_slot(module: nn.Module) -> str:
    """Return the name of the attribute with the author's forward, which hooks of accelerate move to `_old_forward`."""
    # torch.compile can trace this expression.
    is_wrapped = WRAPPER_HOOK in module.__dict__ and WRAPPED_FORWARD in module.__dict__
    return WRAPPED_FORWARD if is_wrapped else "forward"


def full_shape(x: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the whole parameter if DeepSpeed's ZeRO-3 has left an empty tensor here.
    ZeRO-3 keeps the whole shape in `ds_shape`, seen in DeepSpeed 0.19. Without it, the shape is that of the empty
    tensor, and recognition tries likely widths, as it does for the empty shards of FSDP1."""
    return tuple(getattr(x, "ds_shape", x.shape))


def is_hook_of_deepspeed(hook: Callable) -> bool:
    """Return True if DeepSpeed defines a hook. It puts hooks on every module, also on those without parameters."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def keeps_versions(parameter: Tensor) -> bool:
    """Return True if a new version of a parameter is known to follow whenever an engine writes to it. FSDP2 gathers
    values into the same memory again and again, and restores the version each time. It changes the class of the modules
    that it shards. Nothing tells to which parameters that applies, so one such class makes the answer False for all of
    them. During a forward of FSDP1, the attribute of the module is not the parameter itself. ZeRO-3 exchanges the
    memory of a parameter, and gives the parameter an id."""
    if type(parameter) is not nn.Parameter or parameter.is_inference() or hasattr(parameter, "ds_id"):
        return False
    # An engine that was never imported has sharded nothing.
    sharded_class = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return sharded_class is None or not sharded_class.__subclasses__()
