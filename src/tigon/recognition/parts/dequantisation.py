"""Find the dense weight of a frozen base layer that bitsandbytes stores in 4 bits.

Such a layer computes its product by its own code. An op may compute the product of the dequantised weight instead, in
one node with the products of the adapters. Before it does, the layer and the product of the weight are run on a small
input and compared, and so are the weights that Tigon's kernel and the library dequantise.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.adapters.four_bit import FourBitWeight, QuantisedScales, dequantise
from tigon.ops.adapters.projection import FrozenWeight, TensorLike, product_dtype
from tigon.recognition.probing.standin import describe
from tigon.runtime.autograd import version_of, without_saved_tensor_hooks
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.stock import written_in
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

# The fewest rows of an input for which an op dequantises the weight. Kernels for few rows, as in the generation of
# text, read quantised weights faster. The choice must not depend on whether gradients are computed: a layer that is
# checkpointed runs without them first, and with them later.
MIN_ROWS = 256
# The different rows of the input on which a layer and the product of its weight are compared.
ROWS = 3
# The number of rows of this input, with repetitions. With up to 1536 rows, bitsandbytes runs kernels of its own on a
# GPU, which round in other places. With more rows it dequantises the weight, as it does in training.
COMPARED_ROWS = {"cuda": 2049}
# The largest relative difference of the two, as Euclidean norms. Each of them rounds every output once, by 2^-9 at most
# in bf16. A layer that also rounds its input to 8 bits differs by far more for a row with one large element.
LARGEST_DIFFERENCE = 2**-8


def _state_of(layer: Any) -> Any:
    """Return the quantisation state of a layer of bitsandbytes in 4 bits, or None. Sharded weights may have lost it."""
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def _four_bit_weight(weight: Tensor, state: Any) -> FourBitWeight | None:
    """Return a weight of bitsandbytes in 4 bits for Tigon's kernel: dense, on one device, in whole bytes; else None."""
    stored, nested = weight.data, state.state2 if state.nested else None
    quantised_scales = None
    if nested is not None:
        quantised_scales = QuantisedScales(nested.code, nested.absmax, state.offset, nested.blocksize)
    tensors = [stored, state.code, state.absmax, *(quantised_scales or ())[:3]]
    is_readable = all(type(x) is Tensor and x.device == stored.device and x.is_contiguous() for x in tensors)
    # The first dimension of a transposed weight is 1, and bitsandbytes transposes the dense weight.
    if not is_readable or not runs_kernels(state.code) or stored.dim() != 2 or len(stored) == 1:
        return None
    expected_dtypes = [torch.float32, torch.float32 if nested is None else torch.uint8, *[torch.float32] * 3]
    if any(x.dtype != dtype for x, dtype in zip(tensors[1:], expected_dtypes, strict=False)):
        return None
    packed = stored.view(torch.uint8)
    return FourBitWeight(
        packed, state.code, state.absmax, state.blocksize, quantised_scales, torch.Size(state.shape), state.dtype
    )


def _find_weight(layer: Any, uses_kernel: bool) -> Callable[[], Tensor]:
    """Return a function that computes the dense weight [O, I] of a layer in 4 bits, with `uses_kernel` by Tigon's
    kernel. It belongs to the weight that the layer has now, and not to one that replaces it later."""
    from bitsandbytes.functional import dequantize_4bit

    weight, state = layer.weight, _state_of(layer)
    version = version_of(weight)
    four_bit_weight = _four_bit_weight(weight, state) if uses_kernel else None

    def compute() -> Tensor:
        if version_of(weight) != version:
            raise RuntimeError(
                "tigon: a quantised weight that backward needs was modified in place after the forward pass"
            )
        return dequantize_4bit(weight.data, state) if four_bit_weight is None else dequantise(four_bit_weight)

    return compute


def _example_input(features: int, dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Return `ROWS` rows, each with one element that is much larger than the others, and repetitions of them."""
    repetitions = COMPARED_ROWS.get(weight.device.type, ROWS) // ROWS
    x = torch.linspace(-1, 1, ROWS * features, dtype=torch.float64).view(ROWS, features).mul(37).sin()
    x[range(ROWS), range(ROWS)] = 30.0
    return x.to(weight.device, dtype).repeat(repetitions, 1).requires_grad_()


def _computes_product(layer: Any, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a layer multiplies an input of this dtype by its dense weight, adds its bias, and nothing else.
    Under autocast, the product must have the dtype of autocast, and the output must have the dtype of the input."""
    x = _example_input(layer.in_features, dtype, weight)
    is_weight = type(weight) in PLAIN and weight.shape == (layer.out_features, layer.in_features)
    if not is_weight or weight.dtype != product_dtype(x):
        return False
    with torch.enable_grad(), without_saved_tensor_hooks():
        y = type(layer).forward(layer, x)
    if type(y) not in PLAIN or y.dtype != dtype:
        return False
    bias = None if layer.bias is None else layer.bias.double()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows, outputs = x[:ROWS].to(weight.dtype).double(), y.view(-1, ROWS, y.shape[-1])[[0, -1]].double()
        difference = outputs - F.linear(rows, weight.double(), bias)
        error, size = float(difference.norm()), float(outputs.norm())
    LOGGER.debug("%s differs from the product of its weight by %.1e of %.1e", type(layer).__name__, error, size)
    return error <= LARGEST_DIFFERENCE * size


class _Result(NamedTuple):
    """The result of the comparison of a layer with its dense weight."""

    # It is True if the layer multiplies by its dense weight and does nothing else.
    computes_product: bool
    uses_kernel: bool


@cached_weakly
def _known_results(layer: Any) -> list[tuple[Any, dict[tuple[Any, ...], _Result]]]:
    """Return the list with the compared state and its results. Threads share it, so both change in one assignment."""
    return [(None, {})]


def read_weight(layer: Any, x: Tensor | TensorLike) -> FrozenWeight | None:
    """Return the weight of a layer in 4 bits if an op may multiply x by it, and None if the layer has to be called. The
    layer's own forward is compared with the product of the weight, and again if the weight, its device, the dtype of
    the product, that of the input or that of autocast changes. On the meta device there are no values to compare:
    `tigon plan` stands for such layers there by others that have a method `dequantize`."""
    state, weight = _state_of(layer), layer._parameters.get("weight")
    is_simulated = weight is not None and weight.is_meta and hasattr(layer, "dequantize")
    if weight is None or weight.requires_grad or not (is_simulated or (state is not None and _is_known(layer))):
        return None
    if x.shape.numel() // max(x.shape[-1], 1) < MIN_ROWS:
        return None
    dtype, shape = product_dtype(x), torch.Size((layer.out_features, layer.in_features))
    if is_simulated:
        return FrozenWeight(layer.dequantize, shape, dtype, weight.device)
    known = _known_results(layer)
    known_state, results = known[0]
    if state is not known_state:
        known[0] = state, (results := {})
    read_key = lambda: (layer.compute_dtype, layer.weight.device, x.dtype, dtype, type(layer).forward)
    result = results.get(read_key())
    if result is None:
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        key, result = read_key(), compare(layer, x.dtype)
        # The first call of a layer may have set the dtype in which it computes.
        results[key] = results[read_key()] = result
    if not result.computes_product:
        return None
    return FrozenWeight(_find_weight(layer, result.uses_kernel), shape, dtype, weight.device)


def compare(layer: Any, dtype: torch.dtype) -> _Result:
    """Return whether the layer's product is that of its dense weight, and which code dequantises the weight."""
    try:
        weight = _find_weight(layer, uses_kernel=False)()
        if not _computes_product(layer, weight, dtype):
            return _Result(False, False)
        with torch.no_grad():
            four_bit_weight = _four_bit_weight(layer.weight, _state_of(layer))
            has_shape = four_bit_weight is not None and four_bit_weight.shape == weight.shape
            return _Result(True, has_shape and torch.equal(dequantise(four_bit_weight), weight))  # type: ignore[arg-type]
    except Exception as error:
        LOGGER.debug("%s cannot be dequantised: %s", type(layer).__name__, describe(error), exc_info=True)
        return _Result(False, False)


def _is_known(layer: Any) -> bool:
    """Return whether a layer runs code of bitsandbytes, and holds nothing but its weight and its bias."""
    return not layer._modules and not layer._buffers and _is_of_bitsandbytes(type(layer))


@cached_weakly
def _is_of_bitsandbytes(cls: Any) -> bool:
    """Return whether bitsandbytes has written the forward of a class."""
    return written_in(cls.forward).startswith("bitsandbytes.")
