"""Group modules into kinds, so that recognition runs once for each kind: modules of one kind compute the same."""

from torch import nn

from tigon.recognition.replacement import is_changed
from tigon.recognition.standin import own_tensors
from tigon.runtime.engines import full_shape
from tigon.runtime.state.modules import MODULE_STATE

__all__ = ["kind_of"]


def kind_of(module: nn.Module) -> tuple:
    """Return everything that recognition depends on. A model with many layers has few kinds."""
    settings = [(name, value) for name, value in vars(module).items() if name not in MODULE_STATE]
    # The type is included, because 1 and True are equal.
    attributes = tuple(
        (k, type(v), v if isinstance(v, (int, float, str, bool, type(None))) else id(v)) for k, v in settings
    )
    tensors = own_tensors(module).items()
    shapes = tuple((k, None if t is None else full_shape(t)) for k, t in tensors)
    children = tuple((k, None if child is None else kind_of(child)) for k, child in module._modules.items())
    return type(module), attributes, shapes, children, is_changed(module)
