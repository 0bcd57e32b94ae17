"""cuBLASLt through ctypes: a matrix product by one of its "ping-pong" kernels, if it proposes one.

The module `products` says when these kernels are faster. A kernel is used only if cuBLASLt itself proposes it for
exactly the sizes, strides and alignments of a product. A wrong number below can therefore make a product slow, but not
wrong.

The library is the copy that torch has loaded; this module loads none. With `TIGON_CUBLASLT=0` it is not used, and
`torch.mm` computes the products.

Shapes: out [M, N] = a [M, K] b [K, N].
"""

import ctypes
import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream
from tigon.runtime.device import HIP

# --- names and values of cublasLt.h ----------------------------------------------------------------

MATMUL_DESC_TRANSA, MATMUL_DESC_TRANSB = 3, 4
# The alignments of B, C and D have the numbers after that of A.
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES = 1, 5
ALGO_CONFIG_ID, ALGO_CONFIG_TILE_ID, ALGO_CONFIG_SPLITK_NUM = 0, 1, 2
COMPUTE_32F = 68
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
# The numbers of the algorithm and of its ping-pong tiles, the best tile first. They are undocumented and were seen in
# cuBLAS 13.0. Where cuBLASLt proposes no such kernel, `torch.mm` computes the product.
NVJET = 66
PING_PONG_TILES = {"176x128": 201, "168x128": 197, "128x160": 29, "144x128": 184, "128x128": 20}

# 1024 bytes are enough for a counter of tiles. Kernels that split K need more, and are not requested.
WORKSPACE_BYTES = 1024
# cuBLASLt proposes at most 8 kernels. The array has room for twice as many.
MAX_PROPOSALS = 16
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
# _POINTER points to an object of the library, to memory of the device, or to the value of an attribute. _NEW points to
# the variable into which a function writes the pointer of a new object. _SET are the parameters of every function that
# sets an attribute.
_POINTER = ctypes.c_void_p
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
    """Declare the parameters and the result of every function that is called."""
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
    and its own memory on the device."""
    if HIP or torch.version.cuda is None or not is_enabled() or not hasattr(os, "RTLD_NOLOAD"):
        return None
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        return declare(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL))
    except (OSError, AttributeError):
        return None


def state() -> str:
    """Return a text for `tigon env` that says whether products may use cuBLASLt."""
    if not is_enabled():
        return "off (TIGON_CUBLASLT=0)"
    if _library() is None:
        return "not used (torch has loaded no cuBLASLt)"
    return f"the library of torch, CUDA {torch.version.cuda}, on Hopper GPUs"


_handles: dict[int, ctypes.c_void_p] = {}


def _handle(device: int) -> ctypes.c_void_p | None:
    """Return a handle of the current device, or None if there is no library or a graph is being captured."""
    if device in _handles:
        return _handles[device]
    library, handle = _library(), ctypes.c_void_p()
    # Creating a handle allocates memory, which the capture of a CUDA graph does not allow.
    if library is None or torch.cuda.is_current_stream_capturing():
        return None
    if library.cublasLtCreate(ctypes.byref(handle)) == 0:
        _handles[device] = handle
    return _handles.get(device)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


class MatrixLayout(NamedTuple):
    """The memory layout of a matrix."""

    # True if the columns are contiguous, and False if the rows are
    by_columns: bool
    # elements from one column (or row) to the next
    stride: int


class PlanProblem(NamedTuple):
    """The dtypes, sizes, strides and alignments of a product out [M, N] = a [M, K] b [K, N], or out += a b."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    m: int
    k: int
    n: int
    a_layout: MatrixLayout
    b_layout: MatrixLayout
    # elements from one row of `out` to the next
    out_stride: int
    accumulate: bool
    # bytes by which the addresses of a, b and out can be divided
    alignments: tuple[int, int, int]


class ProductPlan:
    """A product that is ready to run. `algorithm` is the ping-pong kernel with the first tile of `tiles` that cuBLASLt
    proposes, or None if it proposes none. cuBLAS stores matrices by columns. A row-major out [M, N] is therefore out^T
    for cuBLAS, the product of b^T and a^T."""

    def __init__(self, handle: ctypes.c_void_p, problem: PlanProblem, tiles: tuple[int, ...]) -> None:
        self.cublaslt: Any = _library()
        self.handle = handle
        # the objects of the library that `__del__` destroys, each with the name of its kind
        self.created_objects: list[tuple[str, ctypes.c_void_p]] = []
        m, k, n, a_layout, b_layout = problem.m, problem.k, problem.n, problem.a_layout, problem.b_layout
        self.operation = self._create("cublasLtMatmulDesc", COMPUTE_32F, DATA_TYPES[torch.float32])
        for attribute, layout in ((MATMUL_DESC_TRANSA, b_layout), (MATMUL_DESC_TRANSB, a_layout)):
            self._set("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.c_int32(layout.by_columns))
        self.layouts = (
            self._create_layout(problem.dtype, *((k, n) if b_layout.by_columns else (n, k)), b_layout.stride),
            self._create_layout(problem.dtype, *((m, k) if a_layout.by_columns else (k, m)), a_layout.stride),
            self._create_layout(problem.out_dtype, n, m, problem.out_stride),
        )
        preference = self._create("cublasLtMatmulPreference")
        set_preference = functools.partial(self._set, "cublasLtMatmulPreferenceSetAttribute", preference)
        set_preference(PREF_MAX_WORKSPACE_BYTES, ctypes.c_size_t(WORKSPACE_BYTES))
        a_alignment, b_alignment, out_alignment = problem.alignments
        for i, alignment in enumerate((b_alignment, a_alignment, out_alignment, out_alignment)):
            set_preference(PREF_MIN_ALIGNMENT_A_BYTES + i, ctypes.c_uint32(alignment))
        self.one, self.beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if problem.accumulate else 0.0)
        self.algorithm = self._choose(preference, tiles)

    def _create(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        _check(getattr(self.cublaslt, f"{kind}Create")(ctypes.byref(pointer), *arguments))
        self.created_objects.append((kind, pointer))
        return pointer

    def _create_layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        return self._create("cublasLtMatrixLayout", DATA_TYPES[dtype], rows, columns, stride)

    def _set(self, function: str, object: ctypes.c_void_p, attribute: int, value: Any) -> None:
        _check(getattr(self.cublaslt, function)(object, attribute, ctypes.byref(value), ctypes.sizeof(value)))

    def _choose(self, preference: ctypes.c_void_p, tiles: tuple[int, ...]) -> _Algorithm | None:
        proposals, count = (_Proposal * MAX_PROPOSALS)(), ctypes.c_int()
        left, right, out = self.layouts
        status = self.cublaslt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, left, right, out, out, preference, MAX_PROPOSALS, proposals,
            ctypes.byref(count),
        )  # fmt: skip
        # The status is an error if no kernel fits.
        if status:
            return None
        algorithms: dict[int, _Algorithm] = {}
        for proposal in proposals[: count.value]:
            identity, tile, splits = (
                self._property(proposal.algorithm, name)
                for name in (ALGO_CONFIG_ID, ALGO_CONFIG_TILE_ID, ALGO_CONFIG_SPLITK_NUM)
            )
            if proposal.state == 0 and identity == NVJET and splits == 1:
                algorithms.setdefault(tile, proposal.algorithm)
        return next((algorithms[tile] for tile in tiles if tile in algorithms), None)

    def _property(self, algorithm: _Algorithm, name: int) -> int:
        value, value_size = ctypes.c_int32(-1), ctypes.c_size_t()
        self.cublaslt.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algorithm), name, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(value_size)
        )
        return value.value

    def run(self, a: Tensor, b: Tensor, out: Tensor) -> bool:
        """Compute the product, or return False. cuBLASLt is not called again after it refuses its own proposal once."""
        if self.algorithm is None:
            return False
        left, right, result = self.layouts
        workspace = out.new_empty(WORKSPACE_BYTES, dtype=torch.uint8)
        status = self.cublaslt.cublasLtMatmul(
            self.handle, self.operation, ctypes.byref(self.one), b.data_ptr(), left, a.data_ptr(), right,
            ctypes.byref(self.beta), out.data_ptr(), result, out.data_ptr(), result,
            ctypes.byref(self.algorithm), workspace.data_ptr(), WORKSPACE_BYTES, current_raw_stream(out.get_device()),
        )  # fmt: skip
        if status:
            self.algorithm = None
        return status == 0

    def __del__(self) -> None:
        for kind, pointer in self.created_objects:
            getattr(self.cublaslt, f"{kind}Destroy")(pointer)


def plan(device: int, problem: PlanProblem, tiles: tuple[int, ...]) -> ProductPlan | None:
    """Return the plan of a product with one of the tiles, or None if the device or the library has none."""
    # A handle cannot be created while a graph is captured. `_plan` caches its results, so it is not called then.
    return None if _handle(device) is None else _plan(device, problem, tiles)


# The length of the last chunk of a loss depends on the number of valid tokens, so there are many plans, and the cache
# drops old ones.
@functools.lru_cache(maxsize=512)
def _plan(device: int, problem: PlanProblem, tiles: tuple[int, ...]) -> ProductPlan | None:
    handle = _handle(device)
    assert handle is not None
    try:
        return ProductPlan(handle, problem, tiles)
    except RuntimeError:
        # This version of the library does not know an attribute or a value.
        return None
