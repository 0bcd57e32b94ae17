"""Count what a step on meta tensors would need on a GPU: bytes alive at each moment, arithmetic and memory traffic.

The ledger sees every operation of torch. Each operation allocates the storages of its results and frees others, in the
order that the allocator of a GPU would see. The peak is the maximum over all moments, and not a formula. Arithmetic is
counted by the formulas of torch. The buffers of Tigon's kernels are allocated, but the kernels do not run.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from tigon.memory.attention import run_attention
from tigon.runtime.compat.autograd import DisableTorchFunction, storage_id
from tigon.runtime.compat.graphs import DispatchMode
from tigon.runtime.compat.operators import grouped_mm, is_in_place, read_scalar
from tigon.runtime.device import Device, simulated

H200 = Device(multiprocessors=132, warp_size=32, shared_memory=232448, async_copy=True, arch="sm_90")

# The caching allocator rounds up to multiples of this many bytes.
ALLOCATION_UNIT = 512

# Operations that allocate a tensor or set its storage, and neither read nor write memory.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}


# Functions that count the multiplications and additions of an operation. The gradients of the matrices of groups take
# as many as the products of the rows.
FLOP_COUNTERS = {**flop_registry, grouped_mm: lambda a, b, *args, **options: 2 * a.numel() * b.shape[-1]}
# The operation that copies one value to the host.
READ_SCALAR = getattr(read_scalar, "default", None)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments or the result of an operation: in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _extent(x: Tensor) -> int:
    """Return the bytes that reading or writing a whole tensor moves. Expanded dimensions are read once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


@dataclass
class Work:
    """The work of a part of a step on one GPU."""

    # Multiplications and additions in matrix products, and in attention.
    products: int = 0
    attention: int = 0
    # Bytes that all other operations read and write, that are sent to other GPUs, and that are copied to or from the
    # host.
    traffic: int = 0
    exchanged: int = 0
    to_host: int = 0

    def minus(self, other: "Work") -> "Work":
        """Return the work that was done since `other`."""
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Ledger(DispatchMode):
    """A block in which meta tensors are counted as if they were on a GPU. `live` and `peak` are the bytes that are
    alive now, and the most that were alive; `host` those of pinned memory. `shards` GPUs share the parameters and their
    gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.device = H200
        self.shards = 1
        self.live = self.peak = 0
        self.host = 0
        self.work = Work()
        # The ledger calls this function with each tensor that an operation reads.
        self.on_read: Callable[[Tensor], None] | None = None
        # The bytes that are counted for each storage.
        self._counted: dict[int, int] = {}
        # The storages of results of `torch.any`.
        self._results_of_any: set[int] = set()
        self._blocks = contextlib.ExitStack()

    def __enter__(self) -> "Ledger":
        self._blocks.enter_context(simulated(self))
        self._blocks.enter_context(_Attention(self))
        for owner in (torch, torch.amp):
            self._blocks.enter_context(patch.object(owner, "autocast", _autocast))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._blocks.close()

    def add(self, nbytes: int) -> None:
        """Add bytes that something other than a tensor allocates; a negative number frees them."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def count(self, x: Tensor) -> bool:
        """Count a tensor's storage as long as it is alive. Return True if it was not counted before."""
        storage = x.untyped_storage()
        key = storage_id(storage)
        if key in self._counted:
            return False
        self._counted[key] = nbytes = -(-storage.nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT
        weakref.finalize(storage, self._free, key).atexit = False
        self.add(nbytes)
        return True

    def _free(self, key: int) -> None:
        self.live -= self._counted.pop(key)
        self._results_of_any.discard(key)

    def exclude(self, x: Tensor) -> None:
        """Count nothing for a tensor's storage from now on, because it is not on the GPU or is counted elsewhere."""
        self.count(x)
        key = storage_id(x.untyped_storage())
        self.live -= self._counted[key]
        self._counted[key] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Operations inside of this one are not attention. The check for attention would double the time.
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation on meta, and count its allocations and its work."""
        inputs = list(_tensors((args, kwargs)))
        if self.on_read is not None:
            for x in inputs:
                self.on_read(x)
        if func is READ_SCALAR and inputs[0].is_meta and inputs[0].dtype == torch.bool:
            # Models read such a value to learn if all tokens belong to one sequence, or if any is padding. Here all
            # tokens belong to one sequence, and none is padding.
            return storage_id(inputs[0].untyped_storage()) not in self._results_of_any
        result = func(*args, **kwargs)
        operator = func.overloadpacket
        if operator is torch.ops.aten.any and result.is_meta:
            self._results_of_any.add(storage_id(result.untyped_storage()))
        outputs = [x for x in _tensors(result) if x.is_meta]
        new_storages = sum(self.count(x) for x in outputs)
        if (count_flops := FLOP_COUNTERS.get(operator)) is not None:
            self.work.products += count_flops(*args, **kwargs, out_val=result)
        elif (new_storages or is_in_place(func)) and operator.__name__ not in ALLOCATIONS:
            views = {(storage_id(x.untyped_storage()), x.storage_offset(), x.shape): x for x in (*inputs, *outputs)}
            self.work.traffic += sum(_extent(x) for x in views.values() if x.is_meta)
        return result

    def count_launch(self, arguments: tuple) -> None:
        """Count the traffic of a kernel that would run."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if self.on_read is not None:
            for x in tensors:
                self.on_read(x)
        self.work.traffic += sum(map(_extent, tensors))

    def count_copy(self, copy: Tensor, host_bytes: int) -> None:
        """Count a copy to the host, where it takes `host_bytes`, or back if these are 0."""
        self.work.to_host += copy.nbytes
        if host_bytes:
            # Memory of the host is not memory of the GPU.
            self.exclude(copy)
            self.host += host_bytes


def _autocast(device_type: str, *args: Any, autocast: Any = torch.autocast, **kwargs: Any) -> Any:
    """Return `torch.autocast`, or no block for meta tensors, for which torch raises an error."""
    return contextlib.nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)


class _Attention(TorchFunctionMode):
    """Let `scaled_dot_product_attention` save what a GPU's fused kernels save; on meta it would save all scores."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Count attention and return its output. The parameters are those of torch's function."""
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        flops = 2 * scores * (query.shape[-1] + value.shape[-1])
        # Kernels skip the blocks that a causal mask excludes, which are half of them.
        return _FusedAttention.apply(query, key, value, attn_mask, self.ledger, flops // 2 if is_causal else flops)


def _attend(query: Tensor, value: Tensor, ledger: Ledger, flops: int) -> tuple[Tensor, Tensor]:
    """Count a call of a kernel. Return its output and one fp32 number per row."""
    has_query_shape = query.shape[-1] == value.shape[-1]
    like_out = query if has_query_shape else query[..., :1].expand(query.shape[:-1] + value.shape[-1:])
    ledger.work.attention += flops
    # The output has the memory layout of the queries.
    return torch.empty_like(like_out), query.new_empty(query.shape[:-1], dtype=torch.float32)


class _FusedAttention(torch.autograd.Function):
    """Save queries, keys, values, the output and one fp32 number per row, as the kernels of cuDNN and flash do."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, mask, ledger, flops = inputs
        # In the second run of a checkpointed layer, this returns the outputs that the first run has saved.
        out, lse = run_attention(_FusedAttention, functools.partial(_attend, query, value, ledger, flops))
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.ledger, ctx.flops = ledger, flops
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (dout,) = grad_outputs
        del grad_outputs
        query, key, value, _, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        # The kernels accumulate dq in fp32, and compute delta, which is one number per row.
        buffers = query.new_empty(query.shape, dtype=torch.float32), torch.empty_like(lse)
        # Backward has five products where the forward pass has two.
        ctx.ledger.work.attention += ctx.flops * 5 // 2
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        del buffers, out, dout
        return *gradients, None, None, None
