"""Group modules into kinds: modules of one kind compute the same, so recognition runs once for each kind."""

from torch import nn

from tigon.recognition.replacement import is_changed
from tigon.recognition.standin import own_tensors

__all__ = ["kind_of"]

# Attributes that every module has, and those that hooks of accelerate leave. They do not show what a module computes.
STATE = {*vars(nn.Module()), "training", "forward", "_hf_hook", "_old_forward", "_replicate_for_data_parallel"}


def kind_of(module: nn.Module) -> tuple:
    """Return everything that recognition depends on. A model with many layers has few kinds."""
    state = [(name, value) for name, value in vars(module).items() if name not in STATE]
    # The type is included, because 1 and True are equal.
    own = tuple((k, type(v), v if isinstance(v, (int, float, str, bool, type(None))) else id(v)) for k, v in state)
    tensors = own_tensors(module).items()
    shapes = tuple((k, None if t is None else tuple(getattr(t, "ds_shape", t.shape))) for k, t in tensors)
    children = tuple((k, None if child is None else kind_of(child)) for k, child in module._modules.items())
    return type(module), own, shapes, children, is_changed(module)
