"""Find the dense weight of a frozen base layer that stores its weight in another form, such as the 4 bits of nf4.

Such a layer computes its product by its own code. If the layer can return its dequantised weight, an op may compute the
product instead, in one node with the products of the adapters. Whether the layer computes this product and nothing else
is not read from its class: the layer and the product of the weight are run on a small input and compared.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.adapters.four_bit import FourBitWeight, QuantisedScales, dequantise
from tigon.ops.adapters.frozen_weight import FrozenWeight
from tigon.recognition.probing.deferred import TensorLike, product_dtype
from tigon.recognition.probing.standin import describe
from tigon.runtime.device import PLAIN, Device, device_of, runs_kernels
from tigon.runtime.tuning import LaunchConfig

LOGGER = logging.getLogger("tigon")

# The different rows of the input on which a layer and the product of its weight are compared.
ROWS = 3
# The largest relative difference of the two, as Euclidean norms. Each of them rounds every output once, by 2^-9 at most
# in bf16. A layer that also rounds its input to 8 bits differs by far more for a row with one large element.
LARGEST_DIFFERENCE = 2**-8
# So many results of comparisons are kept. The settings of a layer rarely change.
LARGEST_NUMBER_OF_RESULTS = 8


class DequantisationProblem(NamedTuple):
    """The property that the choice depends on."""

    is_gpu: bool


@dataclass(frozen=True)
class DequantisationConfig(LaunchConfig):
    """The numbers of rows that decide which code of a layer is replaced, and which code is compared."""

    # The fewest rows of an input for which an op dequantises the weight. Kernels for few rows, as in the generation of
    # text, read quantised weights faster. The choice must not depend on whether gradients are computed: a layer that is
    # checkpointed runs without them first, and with them later.
    min_rows: int
    # The rows of the input on which a layer and the product of its weight are compared. With up to 1536 rows,
    # bitsandbytes runs kernels of its own on a GPU, which round in other places. With more rows it dequantises the
    # weight, as it does in training.
    compared_rows: int

    @staticmethod
    def heuristic(problem: DequantisationProblem, device: Device) -> "DequantisationConfig":
        return DequantisationConfig(min_rows=256, compared_rows=2049 if problem.is_gpu else ROWS)


def _state_of(layer: Any) -> Any:
    """Return the quantisation state of a layer of bitsandbytes in 4 bits; None for any other layer.

    Engines that shard parameters may lose the attributes of a parameter. The layer then still has the state.
    """
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def _version(tensor: Any) -> int:
    """Return a number that changes if the tensor is written in place; 0 for other objects and inference tensors."""
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def _four_bit_weight(weight: Any, state: Any) -> FourBitWeight | None:
    """Return a weight of bitsandbytes in 4 bits for Tigon's kernel; None if the kernel cannot read it.

    `state` is the quantisation state. The kernel reads dense tensors on one device, and whole bytes.
    """
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


def _kernel_agrees(layer: Any) -> bool:
    """Return whether Tigon's kernel dequantises the layer's weight of 4 bits to the same values as bitsandbytes."""
    state = _state_of(layer)
    four_bit_weight = None if state is None else _four_bit_weight(layer.weight, state)
    expected = None if four_bit_weight is None else _find_weight(layer, uses_kernel=False)
    if four_bit_weight is None or expected is None:
        return False
    weight = expected()
    return weight.shape == four_bit_weight.shape and torch.equal(dequantise(four_bit_weight), weight)


def _find_weight(layer: Any, uses_kernel: bool) -> Callable[[], Tensor] | None:
    """Return a function that computes the dense weight [O, I] of a quantised layer; None if there is no known way.

    The function belongs to the weight that the layer has now, and not to one that replaces it later. With
    `uses_kernel`, it computes a weight of 4 bits by Tigon's kernel, if the kernel can read the weight.
    """
    weight: Any = getattr(layer, "weight", None)
    state = _state_of(layer)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        version = _version(weight)
        four_bit_weight = _four_bit_weight(weight, state) if uses_kernel else None

        def compute() -> Tensor:
            if _version(weight) != version:
                raise RuntimeError(
                    "tigon: a quantised weight that backward needs was modified in place after the forward pass"
                )
            return dequantize_4bit(weight.data, state) if four_bit_weight is None else dequantise(four_bit_weight)

        return compute
    for owner in (layer, weight):
        # Layers of HQQ have this method. That of torch's tensors is for torch's own quantisation.
        method = getattr(type(owner), "dequantize", None)
        if callable(method) and method is not Tensor.dequantize:
            return functools.partial(method, owner)
    return None


def _stored_tensors(layer: Any) -> list[Tensor]:
    return [tensor for table in (layer._parameters, layer._buffers) for tensor in table.values() if tensor is not None]


def _buffers_of(layer: Any) -> list[Tensor]:
    return [buffer for buffer in layer._buffers.values() if buffer is not None]


def _versions_of(layer: Any) -> tuple[int, ...]:
    return tuple(map(_version, _buffers_of(layer)))


def _settings_of(layer: Any) -> tuple[Any, ...]:
    """Return the plain attributes of a layer, on which its code may depend."""
    kinds = (bool, int, float, str, torch.dtype, type(None))
    return tuple((name, value) for name, value in vars(layer).items() if isinstance(value, kinds))


def _config(stored: Tensor) -> DequantisationConfig:
    return DequantisationConfig.choose(DequantisationProblem(stored.is_cuda), device_of(stored))


def _example_input(features: int, dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Return `ROWS` rows, each with one element that is much larger than the others, and repetitions of them."""
    x = torch.linspace(-1, 1, ROWS * features, dtype=torch.float64).view(ROWS, features).mul(37).sin()
    x[range(ROWS), range(ROWS)] = 30.0
    return x.to(weight.device, dtype).repeat(_config(weight).compared_rows // ROWS, 1).requires_grad_()


@contextmanager
def _by_itself() -> Iterator[None]:
    """Run a block with gradients whose tensors are saved for nobody: checkpoints count the tensors of a forward."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


def _computes_product(layer: Any, compute: Callable[[], Tensor], dtype: torch.dtype) -> bool:
    """Return whether a layer multiplies an input of this dtype by its dense weight, adds its bias, and nothing else.

    Under autocast, the product must have the dtype of autocast, and the output must have the dtype of the input. A
    buffer that the call changes gets its values back.
    """
    if any(tensor.is_meta for tensor in _stored_tensors(layer)):
        # There are no values to compare, and none that could be wrong.
        return True
    weight = compute()
    x = _example_input(layer.in_features, dtype, weight)
    is_weight = type(weight) in PLAIN and weight.shape == (layer.out_features, layer.in_features)
    if not is_weight or weight.dtype != product_dtype(x):
        return False
    buffers = [(each, _version(each), each.clone()) for each in layer._buffers.values() if each is not None]
    with _by_itself():
        y = type(layer).forward(layer, x)
    with torch.no_grad():
        changed = [(each, before) for each, version, before in buffers if _version(each) != version]
        for each, before in changed:
            each.copy_(before)
    if changed or type(y) not in PLAIN or y.dtype != dtype:
        return False
    bias = getattr(layer, "bias", None)
    bias = None if bias is None else bias.double()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows, outputs = x[:ROWS].to(weight.dtype).double(), y.view(-1, ROWS, y.shape[-1])[[0, -1]].double()
        difference = outputs - F.linear(rows, weight.double(), bias)
        error, size = float(difference.norm()), float(outputs.norm())
    LOGGER.debug("%s differs from the product of its weight by %.1e of %.1e", type(layer).__name__, error, size)
    return error <= LARGEST_DIFFERENCE * size


class _Result(NamedTuple):
    """The result of the comparison of a layer with its dense weight."""

    # whether the layer multiplies by its dense weight and does nothing else
    computes_product: bool
    # whether Tigon's kernel dequantises the weight as the layer's library does
    uses_kernel: bool
    # the versions of the layer's buffers; a buffer that is written in place has another version
    versions: tuple[int, ...] = ()


class WeightReader:
    """Returns the dense weight of one quantised layer, after a comparison with the layer's own forward.

    The comparison is repeated if a setting of the layer, one of its buffers, the device of one of its tensors, the
    dtype of the input or that of autocast changes.
    """

    def __init__(self) -> None:
        # The quantisation state that the results belong to, and the results by settings and dtypes.
        self._state: Any = None
        # The buffers that the results belong to. A buffer may hold a factor that is 1 until a state dict is loaded. The
        # references are weak, so that a layer that moves to another device frees its memory.
        self._buffers: list[weakref.ref[Tensor]] = []
        self._results: dict[tuple[Any, ...], _Result] = {}

    def __reduce__(self) -> tuple:
        return WeightReader, ()

    def read(self, layer: Any, x: Tensor | TensorLike) -> FrozenWeight | None:
        """Return the weight if an op may multiply x by it, and None if the layer has to be called."""
        stored = _stored_tensors(layer)
        is_trained = any(p is not None and p.requires_grad for name, p in layer._parameters.items() if name != "bias")
        rows = x.shape.numel() // max(x.shape[-1], 1)
        if is_trained or layer._modules or not stored or rows < _config(stored[0]).min_rows:
            return None
        state = _state_of(layer)
        is_same = state is self._state and self._has_same_buffers(layer)
        if not is_same or len(self._results) > LARGEST_NUMBER_OF_RESULTS:
            self._state, self._results = state, {}
            self._buffers = [weakref.ref(each) for each in _buffers_of(layer)]
        key, versions = self._key(layer, x), _versions_of(layer)
        result = self._results.get(key)
        # A layer that computes something else keeps its forward, which may write to a buffer in each call.
        if result is None or (result.computes_product and result.versions != versions):
            if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            result = self._compare(layer, x.dtype)
            # The comparison may have set attributes of the layer, such as the dtype in which it computes.
            self._results[self._key(layer, x)] = result
        compute = _find_weight(layer, result.uses_kernel) if result.computes_product else None
        if compute is None:
            return None
        shape = torch.Size((layer.out_features, layer.in_features))
        return FrozenWeight(compute, shape, product_dtype(x), stored[0].device)

    def _has_same_buffers(self, layer: Any) -> bool:
        buffers = _buffers_of(layer)
        return len(buffers) == len(self._buffers) and all(
            ref() is each for ref, each in zip(self._buffers, buffers, strict=True)
        )

    @staticmethod
    def _key(layer: Any, x: Tensor | TensorLike) -> tuple[Any, ...]:
        # On the meta device there are no values to compare, so that result does not hold on another device.
        devices = tuple(tensor.device for tensor in _stored_tensors(layer))
        return type(layer), _settings_of(layer), devices, x.dtype, product_dtype(x)

    @staticmethod
    def _compare(layer: Any, dtype: torch.dtype) -> "_Result":
        """Return whether the layer's product is that of its dense weight, and which code dequantises the weight."""
        try:
            compute = _find_weight(layer, uses_kernel=False)
            if compute is None or not _computes_product(layer, compute, dtype):
                return _Result(False, False)
            with torch.no_grad():
                return _Result(True, _kernel_agrees(layer), _versions_of(layer))
        except Exception as error:
            LOGGER.debug("%s cannot be dequantised: %s", type(layer).__name__, describe(error), exc_info=True)
            return _Result(False, False)
