"""Matrix products of the head and of the layers of a language model, by cuBLAS or by faster kernels of cuBLASLt.

For [T, H] x [H, V] cuBLAS on Hopper picks "cooperative" kernels, whose warps compute a tile together and then write it
together. While they write, they multiply nothing. In its "ping-pong" kernels, one half of the warps writes while the
other half multiplies. cuBLAS ranks these kernels lower, but they are faster for products that write a large result:
17-38 % if it is added to an fp32 dW, 3-28 % if it is added to a bf16 dW, and 3-10 % for logits (chunks of 640 to 3328
tokens, V = 128256, 151936 and 256000, H200, CUDA 13.0). `product` therefore takes a ping-pong kernel from the list that
cuBLASLt proposes.
Other chips, dtypes and libraries use `torch.mm`, and so does every product with `TIGON_CUBLASLT=0`. dx of the head is
always computed by `torch.mm`: these kernels are up to 6 % faster for it alone, but in a loop at the chip's power limit
the whole loss became up to 3 % slower with them.

Shapes: out [M, N] = a [M, K] b [K, N].
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.runtime import cublaslt
from tigon.runtime.compat.operators import dispatch_modes, native_linear, reshape_without_view
from tigon.runtime.device import Device, device_kind, device_of
from tigon.runtime.launch import on_device
from tigon.runtime.tuning import LaunchConfig


class ProductProblem(NamedTuple):
    """The properties that the choice between cuBLASLt and torch depends on."""

    # bytes of an element of the factors
    itemsize: int


@dataclass(frozen=True)
class ProductConfig(LaunchConfig):
    """Parameters that say which products a ping-pong kernel of cuBLASLt computes."""

    # the shortest side of a factor
    min_side: int
    # The numbers of the tiles of ping-pong kernels, the best one first.
    tiles: tuple[int, ...]

    @staticmethod
    def heuristic(problem: ProductProblem, device: Device) -> "ProductConfig | None":
        """Return None for chips and dtypes without ping-pong kernels: torch computes their products."""
        if device.arch != "sm_90" or problem.itemsize != 2:
            return None
        return ProductConfig(
            # Products with a shorter side have little to gain, and were not measured.
            min_side=512,
            tiles=tuple(cublaslt.PING_PONG_TILES.values()),
        )


# Shorter products of a layer run in torch. 2^39 multiplications take 1.6 ms on an H200. Longer products of a layer
# gain; with shorter ones the step of a model becomes slower (`glu_mlp`). Products of the head have no such limit.
MIN_MULTIPLICATIONS = 2**39


def accumulates_in_fp32(x: Tensor) -> bool:
    """Return whether `product` takes an fp32 `out` for factors of the dtype and on the device of this tensor."""
    return device_kind(x) == "cuda" and x.element_size() == 2


def _layout(x: Tensor) -> cublaslt.MatrixLayout | None:
    """Return how a matrix is stored, or None if neither its rows nor its columns are contiguous."""
    rows, columns = x.shape
    row_stride, column_stride = x.stride()
    if column_stride == 1 and row_stride >= columns:
        return cublaslt.MatrixLayout(False, row_stride)
    return cublaslt.MatrixLayout(True, column_stride) if row_stride == 1 and column_stride >= rows else None


def _alignment(x: Tensor) -> int:
    address = x.data_ptr()
    return min(address & -address, cublaslt.LARGEST_ALIGNMENT)


def _config(a: Tensor) -> ProductConfig | None:
    """Return the config for a factor, or None if torch computes its products."""
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16):
        return None
    return ProductConfig.find(ProductProblem(a.element_size()), device_of(a))


@on_device
def _run_ping_pong(a: Tensor, b: Tensor, out: Tensor, accumulate: bool, config: ProductConfig) -> bool:
    """Compute the product by a ping-pong kernel, and return whether there was one. While a dispatch mode is active, no
    ping-pong kernel runs, because such modes count, cache or simulate the operators of torch, and do not see
    cuBLASLt."""
    if min(*a.shape, *b.shape) < config.min_side:
        return False
    a_layout, b_layout, out_layout = _layout(a), _layout(b), _layout(out)
    if a_layout is None or b_layout is None or out_layout is None or out_layout.by_columns or dispatch_modes():
        return False
    problem = cublaslt.PlanProblem(
        dtype=a.dtype, out_dtype=out.dtype, m=a.shape[0], k=a.shape[1], n=b.shape[1],
        a_layout=a_layout, b_layout=b_layout, out_stride=out_layout.stride, accumulate=accumulate,
        alignments=(_alignment(a), _alignment(b), _alignment(out)),
    )  # fmt: skip
    plan = cublaslt.plan(a.get_device(), problem, config.tiles)
    return plan is not None and plan.run(a, b, out)


def product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Compute out [M, N] = a [M, K] b [K, N], or out += a b. `out` may be fp32 if `accumulates_in_fp32(a)`."""
    config = _config(a)
    if config is not None and _run_ping_pong(a, b, out, accumulate, config):
        return
    # Some versions of torch have no product of mixed dtypes for meta tensors, so a view with the dtype of `a` replaces
    # `out`.
    if out.is_meta and out.dtype != a.dtype:
        out = out.view(a.dtype)[:, ::2]
    dtype_option: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if accumulate:
        torch.addmm(out, a, b, out=out, **dtype_option)
    else:
        torch.mm(a, b, out=out, **dtype_option)


def multiply(
    a: Tensor, b: Tensor, total: Tensor | None = None, min_multiplications: int = MIN_MULTIPLICATIONS,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a b, write it to `out`, or add a b to `total` and return it. At most one of these is given. torch computes
    products with fewer than `min_multiplications` multiplications, and every product for which cuBLASLt proposes no
    ping-pong kernel."""
    m, k = a.shape
    if m * k * b.shape[1] >= min_multiplications and (config := _config(a)) is not None:
        existing = out if total is None else total
        result = a.new_empty(m, b.shape[1]) if existing is None else existing
        if _run_ping_pong(a, b, result, total is not None, config):
            return result
        # Free the buffer before torch allocates its own.
        del result
    return torch.mm(a, b, out=out) if total is None else torch.addmm(total, a, b, out=total)


def multiply_by_weight(x: Tensor, weight: Tensor, min_multiplications: int = MIN_MULTIPLICATIONS) -> Tensor:
    """Return x W^T [..., O] for x [..., H] and W [O, H], as a tensor that is not a view. The limit is as in `multiply`.
    A view that a node returns cannot be modified in place."""
    outputs = weight.shape[0]
    if x.numel() * outputs < min_multiplications and x.is_contiguous() and native_linear is not None:
        # torch multiplies as below, in one call.
        return native_linear(x, weight)
    y = multiply(x.flatten(0, -2), weight.t(), min_multiplications=min_multiplications)
    return reshape_without_view(y, (*x.shape[:-1], outputs))
