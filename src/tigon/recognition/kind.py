"""What tells modules apart that may compute different things: layers of one kind are probed once."""

from torch import nn

from tigon.recognition.replacement import is_changed
from tigon.recognition.standin import own_tensors

__all__ = ["kind_of"]

# Attributes of every module, and what accelerate's hooks leave: nothing that tells what a module computes.
STATE = {*vars(nn.Module()), "training", "forward", "_hf_hook", "_old_forward", "_replicate_for_data_parallel"}


def kind_of(module: nn.Module) -> tuple:
    """What recognition depends on; modules that agree in it are probed once, whatever a model's number of layers."""
    state = [(name, value) for name, value in vars(module).items() if name not in STATE]
    # With its type: 1 and True are equal.
    own = tuple((k, type(v), v if isinstance(v, (int, float, str, bool, type(None))) else id(v)) for k, v in state)
    tensors = own_tensors(module).items()
    shapes = tuple((k, None if t is None else tuple(getattr(t, "ds_shape", t.shape))) for k, t in tensors)
    children = tuple((k, child and kind_of(child)) for k, child in module._modules.items())
    return type(module), own, shapes, children, is_changed(module)
