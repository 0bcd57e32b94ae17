"""Count what a step on meta tensors would need on a GPU: bytes alive at each moment, arithmetic and memory traffic.

The ledger sees every operation of torch. Each operation allocates the storages of its results and frees others, in the
order that the allocator of a GPU would see. The peak is the maximum over all moments, and not a formula. Arithmetic is
counted by the formulas of torch. The buffers of Tigon's kernels are allocated, but the kernels do not run.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tigon.runtime.device import Device, simulated

__all__ = ["H200", "Ledger", "Work"]

H200 = Device(multiprocessors=132, warp_size=32, shared_memory=232448, async_copy=True, arch="sm_90")

BLOCK = 512  # bytes: the caching allocator rounds up to multiples of it

# Operations that make a tensor and touch no memory.
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Count rows times the matrix of their group or, for gradients, columns times rows of one group."""
    return 2 * a.numel() * b.shape[-1]


COUNTS = {**flop_registry, torch.ops.aten._grouped_mm: _grouped_flops}


def _rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


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
    """The work of a part of a step on one GPU.

    Attributes:
        products, attention: Multiplications and additions in matrix products, and in attention.
        traffic: Bytes that all other operations read and write.
        exchanged: Bytes that are sent to other GPUs. As many are received.
        to_host: Bytes that are copied to the host or from it.
    """

    products: int = 0
    attention: int = 0
    traffic: int = 0
    exchanged: int = 0
    to_host: int = 0

    def minus(self, other: "Work") -> "Work":
        """Return the work that was done since `other`."""
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Ledger(TorchDispatchMode):
    """A block in which meta tensors are counted as if they were on a GPU.

    Attributes:
        live, peak: Bytes that are alive now, and the most that were alive.
        host: Bytes of pinned memory that were allocated.
        work: The work so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = H200
        self.live = self.peak = 0
        self.host = 0
        self.work = Work()
        # It is called with each tensor that an operation reads.
        self.watch: Callable[[Tensor], None] | None = None
        # Bytes by storage.
        self._known: dict[int, int] = {}
        # The storages of results of `any`.
        self._any: set[int] = set()
        self._blocks = contextlib.ExitStack()

    def __enter__(self) -> "Ledger":
        self._blocks.enter_context(simulated(self))
        self._blocks.enter_context(_Attention(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._blocks.close()

    # --- memory ----------------------------------------------------------------------------------

    def add(self, nbytes: int) -> None:
        """Add bytes that something other than a tensor allocates; a negative number frees them."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def own(self, x: Tensor) -> bool:
        """Count a tensor's storage as long as it is alive. Return True if it was not counted before."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return False
        self._known[key] = nbytes = _rounded(storage.nbytes())
        weakref.finalize(storage, self._gone, key).atexit = False
        self.add(nbytes)
        return True

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key)
        self._any.discard(key)

    def leave_out(self, x: Tensor) -> None:
        """Count nothing for a tensor's storage from now on, because it is not on the GPU or is counted elsewhere."""
        self.own(x)
        key = x.untyped_storage()._cdata
        self.live -= self._known[key]
        self._known[key] = 0

    # --- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Operations inside of this one are not attention. Checking that would take as long as everything else.
        with torch._C.DisableTorchFunction():
            return self._count(func, args, kwargs or {})

    def _count(self, func: Any, args: tuple, kwargs: dict) -> Any:
        given = list(_tensors((args, kwargs)))
        if self.watch is not None:
            for x in given:
                self.watch(x)
        if func is torch.ops.aten._local_scalar_dense.default and given[0].is_meta and given[0].dtype == torch.bool:
            # Models read such a value to learn if all tokens belong to one sequence, or if any is padding. Here all
            # tokens belong to one sequence, and none is padding.
            return given[0].untyped_storage()._cdata not in self._any
        result = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten.any and result.is_meta:
            self._any.add(result.untyped_storage()._cdata)
        made = [x for x in _tensors(result) if x.is_meta]
        new = sum([self.own(x) for x in made])
        if (count := COUNTS.get(func._overloadpacket)) is not None:
            self.work.products += count(*args, **kwargs, out_val=result)
        elif (new or func._schema.is_mutable) and func._schema.name.partition("::")[2] not in EMPTY:
            touched = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x for x in (*given, *made)}
            self.work.traffic += sum(_extent(x) for x in touched.values() if x.is_meta)
        return result

    # --- events of Tigon's ops -------------------------------------------------------------------

    def launched(self, arguments: tuple) -> None:
        """Count the traffic of a kernel that would run."""
        self.work.traffic += sum(_extent(x) for x in arguments if isinstance(x, Tensor))

    def copied(self, made: Tensor, out: bool) -> None:
        """Count a copy to the host, where the result takes no memory of the GPU, or back."""
        self.work.to_host += made.nbytes
        if out:
            self.leave_out(made)
            # Torch's allocator of pinned memory rounds up to powers of two.
            self.host += 1 << (made.nbytes - 1).bit_length()


# --- attention -----------------------------------------------------------------------------------


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
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        flops = 2 * scores * (query.shape[-1] + value.shape[-1])
        # Kernels leave out the blocks that are masked: half of them.
        return _FusedAttention.apply(query, key, value, attn_mask, self.ledger, flops // 2 if is_causal else flops)


class _FusedAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one fp32 number a row, as the kernels of cuDNN and flash do."""

    @staticmethod
    def forward(ctx, query, key, value, mask, ledger, flops):
        wide = (
            query if query.shape[-1] == value.shape[-1] else query[..., :1].expand(query.shape[:-1] + value.shape[-1:])
        )
        out = torch.empty_like(wide)  # laid out in memory as the queries are
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.ledger, ctx.flops = ledger, flops
        ledger.work.attention += flops
        return out

    @staticmethod
    def backward(ctx, dout):
        query, key, value, _, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        # dq is summed in fp32, delta is one number a row.
        sums = query.new_empty(query.shape, dtype=torch.float32), torch.empty_like(lse)
        ctx.ledger.work.attention += ctx.flops * 5 // 2  # five products where the forward pass has two
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        del sums, out, dout
        return *gradients, None, None, None
