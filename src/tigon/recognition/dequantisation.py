"""Find the dense weight of a frozen base layer that stores its weight in another form, such as the 4 bits of nf4.

Such a layer computes its product by its own code. If the layer can return its dequantised weight, an op may compute the
product instead, in one node with the products of the adapters. Whether the layer computes this product and nothing else
is not read from its class: the layer and the product of the weight are run on a small input and compared.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.adapters.frozen_weight import FrozenWeight
from tigon.recognition.deferred import TensorLike, product_dtype
from tigon.recognition.standin import describe
from tigon.runtime.device import PLAIN

__all__ = ["WeightReader"]

LOGGER = logging.getLogger("tigon")

# The rows of the input on which a layer and the product of its weight are compared.
ROWS = 3
# The largest relative difference of the two, as Euclidean norms. Each of them rounds every output once, by 2^-9 at most
# in bf16. A layer that also rounds its input to 8 bits differs by far more for a row with one large element.
LARGEST_DIFFERENCE = 2**-8


def _state_of(layer: Any) -> Any:
    """Return the quantisation state of a layer of bitsandbytes in 4 bits; None for any other layer.

    Engines that shard parameters may lose the attributes of a parameter. The layer then still has the state.
    """
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def _find_weight(layer: Any) -> Callable[[], Tensor] | None:
    """Return a function that computes the dense weight [O, I] of a quantised layer; None if there is no known way."""
    if _state_of(layer) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return lambda: dequantize_4bit(layer.weight.data, _state_of(layer))
    for owner in (layer, getattr(layer, "weight", None)):
        # Layers of HQQ and weights of torchao have this method.
        if callable(getattr(type(owner), "dequantize", None)) and type(owner) not in PLAIN:
            return lambda owner=owner: owner.dequantize()  # type: ignore[misc]
    return None


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if its type has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _key_of(layer: Any, x: Tensor | TensorLike) -> tuple[Any, ...]:
    """Return what the dense weight of a layer, and the layer's product with an input such as x, depend on."""
    tensors = [x for table in (layer._parameters, layer._buffers) for x in table.values() if x is not None]
    stored = tuple((id(x), x._version, _address(x)) for x in tensors)
    compute_dtype = getattr(layer, "compute_dtype", None)
    return stored, id(_state_of(layer)), compute_dtype, type(layer), x.dtype, product_dtype(x)


def _example_input(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a few rows, each with one element that is much larger than the others."""
    x = torch.linspace(-1, 1, ROWS * features, dtype=torch.float64).view(ROWS, features).mul(37).sin()
    x[range(ROWS), range(ROWS)] = 30.0
    return x.to(device, dtype).requires_grad_()


def _computes_product(layer: Any, compute: Callable[[], Tensor], dtype: torch.dtype) -> bool:
    """Return whether a layer multiplies an input of this dtype by its dense weight, adds its bias, and nothing else.

    Under autocast, the product must have the dtype of autocast, and the output must have the dtype of the input.
    """
    if any(parameter is not None and parameter.is_meta for parameter in layer._parameters.values()):
        # There are no values to compare, and none that could be wrong.
        return True
    weight = compute()
    x = _example_input(layer.in_features, dtype, weight.device)
    is_weight = type(weight) in PLAIN and weight.shape == (layer.out_features, layer.in_features)
    if not is_weight or weight.dtype != product_dtype(x):
        return False
    with torch.enable_grad():
        y = type(layer).forward(layer, x)
    if type(y) not in PLAIN or y.dtype != dtype:
        return False
    bias = getattr(layer, "bias", None)
    bias = None if bias is None else bias.double()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        difference = y.double() - F.linear(x.to(weight.dtype).double(), weight.double(), bias)
        return bool(difference.norm() <= LARGEST_DIFFERENCE * y.double().norm())


class WeightReader:
    """Returns the dense weight of one quantised layer, after a comparison with the layer's own forward.

    The comparison is repeated if the stored weight, the dtype of the input or that of autocast changes.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._is_product = False

    def read(self, layer: Any, x: Tensor | TensorLike) -> FrozenWeight | None:
        """Return the weight if an op may multiply x by it, and None if the layer has to be called.

        Without gradients the layer is called, because kernels for few tokens read quantised weights faster.
        """
        is_trained = any(p is not None and p.requires_grad for name, p in layer._parameters.items() if name != "bias")
        if is_trained or not torch.is_grad_enabled():
            return None
        if _key_of(layer, x) != self._key:
            if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            self._is_product = self._compare(layer, x.dtype)
            # The comparison may have set attributes of the layer, such as the dtype in which it computes.
            self._key = _key_of(layer, x)
        compute = _find_weight(layer) if self._is_product else None
        if compute is None:
            return None
        shape = torch.Size((layer.out_features, layer.in_features))
        return FrozenWeight(compute, shape, product_dtype(x), x.device)

    @staticmethod
    def _compare(layer: Any, dtype: torch.dtype) -> bool:
        """Return whether the layer's product is that of its dense weight."""
        try:
            compute = _find_weight(layer)
            return compute is not None and _computes_product(layer, compute, dtype)
        except Exception as error:
            LOGGER.debug("%s cannot be dequantised: %s", type(layer).__name__, describe(error), exc_info=True)
            return False
