"""Matrix products by cuBLAS, in the head of a language model and in its layers by the kernel that is fastest there.

For [T, H] x [H, V] cuBLAS on Hopper picks "cooperative" kernels, whose warps compute a tile together and write it
together: while they write, nothing is multiplied. Its "ping-pong" kernels, where one half of the warps writes while
the other multiplies, come behind in its ranking, and ahead on the clock wherever much is written for each product:
adding to an fp32 dW by 17-38 %, to a bf16 one by 3-28 %, logits by 3-10 % (chunks of 640 to 3328 tokens, V = 128256,
151936 and 256000, H200, CUDA 13.0). So cuBLASLt is asked for its list, and a ping-pong kernel is taken from it.
Other chips, dtypes and libraries use `torch.mm`, and so does every product with `TIGON_CUBLASLT=0`. dx of the head is
always `torch.mm`: alone these kernels are up to 6 % faster there, but in a loop at the chip's power limit the whole
loss became up to 3 % slower with them.

Shapes: out [M, N] = a [M, K] b [K, N].
"""

import torch
from torch import Tensor

from tigon.runtime import cublaslt
from tigon.runtime.device import device_kind
from tigon.runtime.launch import on_device
from tigon.runtime.torch_private import dispatch_modes

__all__ = ["accumulates_in_fp32", "multiply", "product"]

FEWEST = 512  # with a shorter side there is little to win, and it was not measured
LONG = 2**39  # multiplications, 1.6 ms on an H200: from here on a layer's products gain, below its step loses (glu_mlp)


def _stored(x: Tensor) -> tuple[bool, int] | None:
    """Whether a matrix is stored by columns, and the distance of its rows (or columns); None if by neither."""
    rows, columns = x.shape
    by_rows, by_columns = x.stride()
    if by_columns == 1 and by_rows >= columns:
        return False, by_rows
    return (True, by_columns) if by_rows == 1 and by_columns >= rows else None


def _alignment(x: Tensor) -> int:
    address = x.data_ptr()
    return min(address & -address, cublaslt.LARGEST_ALIGNMENT)


# --- products ------------------------------------------------------------------------------------


def accumulates_in_fp32(x: Tensor) -> bool:
    """Whether `product` takes an fp32 `out` for factors of this tensor's dtype and device."""
    return device_kind(x) == "cuda" and x.element_size() == 2


def _by_cublaslt(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> bool:
    """Whether it is done. Not in a dispatch mode, which counts, caches or simulates what torch does."""
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16) or min(*a.shape, *b.shape) < FEWEST:
        return False
    stored = a_stored, b_stored, out_stored = _stored(a), _stored(b), _stored(out)
    if None in stored or out_stored[0] or dispatch_modes():
        return False
    plan = cublaslt.plan(
        a.get_device(), a.dtype, out.dtype, *a.shape, b.shape[1], a_stored, b_stored, out_stored[1], accumulate,
        (_alignment(a), _alignment(b), _alignment(out)),
    )  # fmt: skip
    return plan is not None and plan.run(a, b, out)


@on_device
def product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """out [M, N] = a [M, K] b [K, N], or += with `accumulate`; `out` may be fp32 where `accumulates_in_fp32`."""
    if _by_cublaslt(a, b, out, accumulate):
        return
    if out.is_meta and out.dtype != a.dtype:  # not every torch has a mixed product there: half of each value stands in
        out = out.view(a.dtype)[:, ::2]
    mixed = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if accumulate:
        torch.addmm(out, a, b, out=out, **mixed)
    else:
        torch.mm(a, b, out=out, **mixed)


@on_device
def multiply(a: Tensor, b: Tensor, onto: Tensor | None = None, least: int = LONG) -> Tensor:
    """a b, or `onto` += a b; by torch below so many multiplications, and wherever `product` would be."""
    if a.is_cuda and a.shape[0] * a.shape[1] * b.shape[1] >= least:
        out = a.new_empty(a.shape[0], b.shape[1]) if onto is None else onto
        if _by_cublaslt(a, b, out, onto is not None):
            return out
        del out  # before torch makes its own
    return torch.mm(a, b) if onto is None else torch.addmm(onto, a, b, out=onto)
