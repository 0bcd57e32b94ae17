"""cuBLASLt through ctypes: a matrix product by one of its "ping-pong" kernels, where it proposes one.

The module `products` says when these kernels are faster. Only kernels are used that cuBLASLt itself proposes for the
very sizes, strides and alignments of a product, so a wrong number below costs speed and never a result.

The library is the copy that torch has loaded; none is loaded here. `TIGON_CUBLASLT=0` switches all of this off, and the
products are then those of `torch.mm`.

Shapes: out [M, N] = a [M, K] b [K, N].
"""

import ctypes
import functools
import os

import torch
from torch import Tensor

from tigon.runtime.device import HIP
from tigon.runtime.torch_private import current_raw_stream

__all__ = ["Plan", "plan", "state"]

# --- names and values of cublasLt.h ----------------------------------------------------------------

MATMUL_DESC_TRANSA, MATMUL_DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES = 1, 5  # followed by those of B, C and D
ALGO_CONFIG_ID, ALGO_CONFIG_TILE_ID, ALGO_CONFIG_SPLITK_NUM = 0, 1, 2
COMPUTE_32F = 68
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
# The numbers of the algorithm and of its ping-pong tiles, the best tile first. They are undocumented and were seen in
# cuBLAS 13.0. Where cuBLASLt proposes no such kernel, `torch.mm` computes the product.
NVJET = 66
PING_PONG_TILES = {"176x128": 201, "168x128": 197, "128x160": 29, "144x128": 184, "128x128": 20}

WORKSPACE = 1024  # bytes: enough for a counter of tiles; kernels that split K need more and are not requested
CANDIDATES = 16  # cuBLASLt proposes at most 8
LARGEST_ALIGNMENT = 256


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


# The parameters of each function, in the order of cublasLt.h. Each function returns a status, a C int. ctypes raises an
# error for an argument that does not fit, where an undeclared function would read wrong memory.
_POINTER = ctypes.c_void_p  # to an object of the library, to memory of the device, or to a value that an attribute has
_NEW = ctypes.POINTER(ctypes.c_void_p)
_SET = [_POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t]
_ALGORITHM = ctypes.POINTER(_Algorithm)
_FLOAT = ctypes.POINTER(ctypes.c_float)
SIGNATURES = {
    "cublasLtCreate": [_NEW],
    "cublasLtMatmulDescCreate": [_NEW, ctypes.c_int, ctypes.c_int],
    "cublasLtMatmulDescSetAttribute": _SET,
    "cublasLtMatmulDescDestroy": [_POINTER],
    "cublasLtMatrixLayoutCreate": [_NEW, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutDestroy": [_POINTER],
    "cublasLtMatmulPreferenceCreate": [_NEW],
    "cublasLtMatmulPreferenceSetAttribute": _SET,
    "cublasLtMatmulPreferenceDestroy": [_POINTER],
    # handle, operation, layouts of a, b, c and d, preference, requested, proposals, number of proposals
    "cublasLtMatmulAlgoGetHeuristic": [
        *[_POINTER] * 7, ctypes.c_int, ctypes.POINTER(_Proposal), ctypes.POINTER(ctypes.c_int),
    ],
    # algorithm, attribute, value, bytes of the value, bytes written
    "cublasLtMatmulAlgoConfigGetAttribute": [
        _ALGORITHM, ctypes.c_int, _POINTER, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t),
    ],
    # handle, operation, alpha, a and its layout, b and its layout, beta, c and its layout, d and its layout,
    # algorithm, workspace, bytes of the workspace, stream
    "cublasLtMatmul": [
        _POINTER, _POINTER, _FLOAT, *[_POINTER] * 4, _FLOAT, *[_POINTER] * 4, _ALGORITHM, _POINTER, ctypes.c_size_t,
        _POINTER,
    ],
}  # fmt: skip


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the parameters and the result of every function that is called.

    Raises:
        AttributeError: The library lacks one of the functions.
    """
    for name, parameters in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = parameters, ctypes.c_int
    return library


def is_enabled() -> bool:
    """Return False if the user has switched cuBLASLt off by `TIGON_CUBLASLT=0`."""
    return os.environ.get("TIGON_CUBLASLT", "1") != "0"


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the cuBLASLt that torch has loaded, or None if torch has none under the name that NVIDIA gives it.

    `RTLD_NOLOAD` finds a library that the process has loaded and loads none: a second copy would have its own handles
    and its own memory on the device.
    """
    if HIP or torch.version.cuda is None or not is_enabled() or not hasattr(os, "RTLD_NOLOAD"):
        return None
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        return declare(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL))
    except (OSError, AttributeError):
        return None


def state() -> str:
    """Return whether products may use cuBLASLt, for `tigon env`."""
    if not is_enabled():
        return "off (TIGON_CUBLASLT=0)"
    if _library() is None:
        return "not used (torch has loaded no cuBLASLt)"
    return f"the library of torch, CUDA {torch.version.cuda}, on Hopper GPUs"


# By device.
_handles: dict[int, ctypes.c_void_p] = {}


def _handle(device: int) -> ctypes.c_void_p | None:
    """Return a handle of the current device, or None unless the device is a Hopper chip and the library is there."""
    if device in _handles:
        return _handles[device]
    library, handle = _library(), ctypes.c_void_p()
    # Creating a handle allocates memory, which the capture of a CUDA graph does not allow.
    if (
        library is None
        or torch.cuda.get_device_capability(device) != (9, 0)
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    if library.cublasLtCreate(ctypes.byref(handle)) == 0:
        _handles[device] = handle
    return _handles.get(device)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


class Plan:
    """A product of given sizes, strides and alignments, ready to run.

    `algorithm` is the ping-pong kernel, or None if cuBLASLt proposes none.


    cuBLAS stores matrices by columns: for it, a row-major out [M, N] is out^T, the product of b^T and a^T.
    """

    def __init__(self, handle, key) -> None:
        dtype, out_dtype, m, k, n, (a_transposed, lda), (b_transposed, ldb), ldd, accumulate, alignments = key
        self.cublaslt, self.handle, self.owned = _library(), handle, []
        make = self._make
        self.operation = make("cublasLtMatmulDesc", COMPUTE_32F, DATA_TYPES[torch.float32])
        for attribute, transposed in ((MATMUL_DESC_TRANSA, b_transposed), (MATMUL_DESC_TRANSB, a_transposed)):
            self._set("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.c_int32(transposed))
        layout = lambda dtype, rows, columns, ld: make("cublasLtMatrixLayout", DATA_TYPES[dtype], rows, columns, ld)
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
        self.algorithm = self._choose(preference)

    def _make(self, kind: str, *arguments) -> ctypes.c_void_p:
        created = ctypes.c_void_p()
        _check(getattr(self.cublaslt, f"{kind}Create")(ctypes.byref(created), *arguments))
        self.owned.append((kind, created))
        return created

    def _set(self, function: str, object: ctypes.c_void_p, attribute: int, value) -> None:
        _check(getattr(self.cublaslt, function)(object, attribute, ctypes.byref(value), ctypes.sizeof(value)))

    def _choose(self, preference: ctypes.c_void_p) -> _Algorithm | None:
        results, count = (_Proposal * CANDIDATES)(), ctypes.c_int()
        left, right, out = self.layouts
        status = self.cublaslt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, left, right, out, out, preference, CANDIDATES, results, ctypes.byref(count)
        )
        # No kernel fits.
        if status:
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
            ctypes.byref(algorithm), name, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
        )
        return value.value

    def run(self, a: Tensor, b: Tensor, out: Tensor) -> bool:
        """Compute the product, or return False. cuBLASLt is not called again after it refuses its own proposal once."""
        if self.algorithm is None:
            return False
        left, right, result = self.layouts
        workspace = out.new_empty(WORKSPACE, dtype=torch.uint8)
        status = self.cublaslt.cublasLtMatmul(
            self.handle, self.operation, ctypes.byref(self.one), b.data_ptr(), left, a.data_ptr(), right,
            ctypes.byref(self.beta), out.data_ptr(), result, out.data_ptr(), result,
            ctypes.byref(self.algorithm), workspace.data_ptr(), WORKSPACE, current_raw_stream(out.get_device()),
        )  # fmt: skip
        if status:
            self.algorithm = None
        return status == 0

    def __del__(self) -> None:
        for kind, created in self.owned:
            getattr(self.cublaslt, f"{kind}Destroy")(created)


# The length of the last chunk changes with the number of valid tokens, so plans come and go.
@functools.lru_cache(maxsize=512)
def plan(device: int, *key) -> Plan | None:
    """Return the plan of a product, or None if the device or the library has none."""
    handle = _handle(device)
    try:
        return None if handle is None else Plan(handle, key)
    except RuntimeError:  # this version of the library does not know an attribute or a value
        return None
