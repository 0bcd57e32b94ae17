"""Matrix products by cuBLAS, in the head of a language model and in its layers by the kernel that is fastest there.

For [T, H] x [H, V] cuBLAS on Hopper picks "cooperative" kernels, whose warps compute a tile together and write it
together: while they write, nothing is multiplied. Its "ping-pong" kernels, where one half of the warps writes while
the other multiplies, come behind in its ranking, and ahead on the clock wherever much is written for each product:
adding to an fp32 dW by 17-38 %, to a bf16 one by 3-28 %, logits by 3-10 % (chunks of 640 to 3328 tokens, V = 128256,
151936 and 256000, H200, CUDA 13.0). So cuBLASLt is asked for its list, and a ping-pong kernel is taken from it.
Whatever cannot be had (another chip, dtype or library) is `torch.mm`. So is dx of the head: alone these kernels are up
to 6 % faster there, but in a loop at the chip's power limit the whole loss became up to 3 % slower with them.

Shapes: out [M, N] = a [M, K] b [K, N].
"""

import ctypes
import functools

import torch
from torch import Tensor

from tigon.runtime.device import HIP, device_kind
from tigon.runtime.launch import on_device

__all__ = ["accumulates_in_fp32", "multiply", "product"]

# --- what of cuBLASLt's interface is needed: names and values of cublasLt.h -----------------------

MATMUL_DESC_TRANSA, MATMUL_DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES = 1, 5  # followed by those of B, C and D
ALGO_CONFIG_ID, ALGO_CONFIG_TILE_ID, ALGO_CONFIG_SPLITK_NUM = 0, 1, 2
COMPUTE_32F = 68
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
# The algorithm whose tiles these are, the best first; seen in cuBLAS 13.0, and where it is not, nothing is chosen.
NVJET = 66
PING_PONG_TILES = {"176x128": 201, "168x128": 197, "128x160": 29, "144x128": 184, "128x128": 20}

FEWEST = 512  # with a shorter side there is little to win, and it was not measured
LONG = 2**39  # multiplications, 1.6 ms on an H200: from here on a layer's products gain, below its step loses (glu_mlp)
WORKSPACE = 1024  # bytes: a counter of tiles; split sums, which need more, are not asked for
CANDIDATES = 16  # it proposes 8 at most
LARGEST_ALIGNMENT = 256


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """cuBLASLt as torch has loaded it."""
    if HIP or torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


_handles: dict[int, ctypes.c_void_p] = {}  # by device


def _handle(device: int) -> ctypes.c_void_p | None:
    """A handle of the device, which is current; None unless it is a Hopper chip with the library."""
    if device in _handles:
        return _handles[device]
    library, handle = _library(), ctypes.c_void_p()
    # To make one allocates, which a CUDA graph does not allow.
    if (
        library is None
        or torch.cuda.get_device_capability(device) != (9, 0)
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    if library.cublasLtCreate(ctypes.byref(handle)) == 0:
        _handles[device] = handle
    return _handles.get(device)


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


class _Plan:
    """A product of given sizes, strides and alignments, ready to run; `found` only if there is a ping-pong kernel.

    cuBLAS counts by columns: to it, a row-major out [M, N] is out^T, the product of b^T and a^T.
    """

    def __init__(self, handle, key) -> None:
        dtype, out_dtype, m, k, n, (a_transposed, lda), (b_transposed, ldb), ldd, accumulate, alignments = key
        self.cublaslt, self.handle, self.owned = _library(), handle, []
        make = self._make
        self.operation = make("cublasLtMatmulDesc", COMPUTE_32F, DATA_TYPES[torch.float32])
        for attribute, transposed in ((MATMUL_DESC_TRANSA, b_transposed), (MATMUL_DESC_TRANSB, a_transposed)):
            self._set("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.c_int32(transposed))
        u64, i64 = ctypes.c_uint64, ctypes.c_int64
        layout = lambda dtype, rows, columns, ld: make(
            "cublasLtMatrixLayout", DATA_TYPES[dtype], u64(rows), u64(columns), i64(ld)
        )
        self.layouts = (
            layout(dtype, *((k, n) if b_transposed else (n, k)), ldb),
            layout(dtype, *((m, k) if a_transposed else (k, m)), lda),
            layout(out_dtype, n, m, ldd),
        )
        preference = make("cublasLtMatmulPreference")
        set_preference = functools.partial(self._set, "cublasLtMatmulPreferenceSetAttribute", preference)
        set_preference(PREF_MAX_WORKSPACE_BYTES, ctypes.c_size_t(WORKSPACE))
        a_alignment, b_alignment, d_alignment = alignments
        for i, alignment in enumerate((b_alignment, a_alignment, d_alignment, d_alignment)):
            set_preference(PREF_MIN_ALIGNMENT_A_BYTES + i, ctypes.c_uint32(alignment))
        self.one, self.beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if accumulate else 0.0)
        self.found = self._choose(preference)

    def _make(self, kind: str, *arguments) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _checked(getattr(self.cublaslt, f"{kind}Create")(ctypes.byref(made), *arguments))
        self.owned.append((kind, made))
        return made

    def _set(self, function: str, object: ctypes.c_void_p, attribute: int, value) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _checked(getattr(self.cublaslt, function)(object, attribute, ctypes.byref(value), size))

    def _choose(self, preference: ctypes.c_void_p) -> _Algorithm | None:
        results, count = (_Found * CANDIDATES)(), ctypes.c_int()
        left, right, out = self.layouts
        status = self.cublaslt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, left, right, out, out, preference, CANDIDATES, results, ctypes.byref(count)
        )
        if status:  # nothing fits
            return None
        tiles = {}
        for result in results[: count.value]:
            identity, tile, splits = (
                self._property(result.algorithm, name)
                for name in (ALGO_CONFIG_ID, ALGO_CONFIG_TILE_ID, ALGO_CONFIG_SPLITK_NUM)
            )
            if result.state == 0 and identity == NVJET and splits == 1:
                tiles.setdefault(tile, result.algorithm)
        return next((tiles[tile] for tile in PING_PONG_TILES.values() if tile in tiles), None)

    def _property(self, algorithm: _Algorithm, name: int) -> int:
        value, written = ctypes.c_int32(-1), ctypes.c_size_t()
        self.cublaslt.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algorithm), name, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)
        )
        return value.value

    def run(self, a: Tensor, b: Tensor, out: Tensor) -> bool:
        """Whether cuBLASLt took the product; if it refuses its own proposal once, it is not asked again."""
        if self.found is None:
            return False
        address = lambda x: ctypes.c_void_p(x.data_ptr())
        left, right, result = self.layouts
        workspace = out.new_empty(WORKSPACE, dtype=torch.uint8)
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(out.get_device()))
        status = self.cublaslt.cublasLtMatmul(
            self.handle, self.operation, ctypes.byref(self.one), address(b), left, address(a), right,
            ctypes.byref(self.beta), address(out), result, address(out), result,
            ctypes.byref(self.found), address(workspace), ctypes.c_size_t(WORKSPACE), stream,
        )  # fmt: skip
        if status:
            self.found = None
        return status == 0

    def __del__(self) -> None:
        for kind, made in self.owned:
            getattr(self.cublaslt, f"{kind}Destroy")(made)


@functools.lru_cache(maxsize=512)  # the last chunk's length changes with the number of valid tokens
def _plan(device: int, *key) -> _Plan | None:
    handle = _handle(device)
    try:
        return None if handle is None else _Plan(handle, key)
    except RuntimeError:  # this version of the library does not know what is asked of it
        return None


def _stored(x: Tensor) -> tuple[bool, int] | None:
    """Whether a matrix is stored by columns, and the distance of its rows (or columns); None if by neither."""
    rows, columns = x.shape
    by_rows, by_columns = x.stride()
    if by_columns == 1 and by_rows >= columns:
        return False, by_rows
    return (True, by_columns) if by_rows == 1 and by_columns >= rows else None


def _alignment(x: Tensor) -> int:
    address = x.data_ptr()
    return min(address & -address, LARGEST_ALIGNMENT)


# --- products ------------------------------------------------------------------------------------


def accumulates_in_fp32(x: Tensor) -> bool:
    """Whether `product` takes an fp32 `out` for factors of this tensor's dtype and device."""
    return device_kind(x) == "cuda" and x.element_size() == 2


def _by_cublaslt(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> bool:
    """Whether it is done. Not in a dispatch mode, which counts, caches or simulates what torch does."""
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16) or min(*a.shape, *b.shape) < FEWEST:
        return False
    stored = a_stored, b_stored, out_stored = _stored(a), _stored(b), _stored(out)
    if None in stored or out_stored[0] or torch._C._len_torch_dispatch_stack():
        return False
    plan = _plan(
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
