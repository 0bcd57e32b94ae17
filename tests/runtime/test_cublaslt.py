"""The binding of cuBLASLt: calls fit the declared parameters, the library is torch's, and users can switch it off."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from tigon.runtime import cublaslt

pytestmark = pytest.mark.no_interpreter("The binding runs no kernel.")


class _Library:
    """A fake cuBLASLt: Python functions behind C function pointers of the declared types. It proposes one kernel."""

    def __init__(self, tile: int = cublaslt.PING_PONG_TILES["128x160"]) -> None:
        self.calls, self.tile = [], tile
        for name, parameters in cublaslt.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *parameters)(self._function(name)))

    def _function(self, name: str):
        def function(*arguments) -> int:
            self.calls.append((name, arguments))
            if name.endswith("Create"):
                arguments[0][0] = len(self.calls)
            elif name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[9][0] = 1
            elif name == "cublasLtMatmulAlgoConfigGetAttribute":
                values = {
                    cublaslt.ALGO_CONFIG_ID: cublaslt.NVJET, cublaslt.ALGO_CONFIG_TILE_ID: self.tile,
                    cublaslt.ALGO_CONFIG_SPLITK_NUM: 1,
                }  # fmt: skip
                ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_int32))[0] = values[arguments[1]]
            return 0

        return function

    def arguments_of(self, name: str) -> list[tuple]:
        return [arguments for called, arguments in self.calls if called == name]


def _plan(monkeypatch, library: _Library) -> cublaslt.ProductPlan:
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(cublaslt, "current_raw_stream", lambda device: 77)
    problem = cublaslt.PlanProblem(
        dtype=torch.bfloat16, out_dtype=torch.float32, m=2, k=3, n=4,
        a_layout=cublaslt.MatrixLayout(False, 3), b_layout=cublaslt.MatrixLayout(True, 3), out_stride=4,
        accumulate=True, alignments=(16, 16, 16),
    )  # fmt: skip
    return cublaslt.ProductPlan(ctypes.c_void_p(1), problem, tuple(cublaslt.PING_PONG_TILES.values()))


def test_product_passes_its_addresses_and_sizes(monkeypatch):
    library = _Library()
    plan = _plan(monkeypatch, library)
    a, b, out = torch.zeros(2, 3).bfloat16(), torch.zeros(3, 4).bfloat16(), torch.zeros(2, 4)
    assert plan.run(a, b, out)
    (arguments,) = library.arguments_of("cublasLtMatmul")
    assert (arguments[3], arguments[5]) == (b.data_ptr(), a.data_ptr())
    assert (arguments[8], arguments[10]) == (out.data_ptr(), out.data_ptr())
    assert (arguments[2][0], arguments[7][0]) == (1.0, 1.0)
    assert arguments[14:] == (cublaslt.WORKSPACE_BYTES, 77)
    layouts = [arguments[1:] for arguments in library.arguments_of("cublasLtMatrixLayoutCreate")]
    assert layouts == [(14, 3, 4, 3), (14, 3, 2, 3), (0, 4, 2, 4)]
    created = sum(name.endswith("Create") for name, _ in library.calls)
    del plan
    assert sum(name.endswith("Destroy") for name, _ in library.calls) == created


def test_kernel_that_is_not_ping_pong_is_not_used(monkeypatch):
    plan = _plan(monkeypatch, _Library(tile=0))
    assert plan.algorithm is None
    assert not plan.run(*[torch.zeros(4, 4)] * 3)


def test_every_function_has_declared_parameters():
    library = SimpleNamespace(**{name: SimpleNamespace() for name in cublaslt.SIGNATURES})
    cublaslt.declare(library)
    for name, parameters in cublaslt.SIGNATURES.items():
        function = getattr(library, name)
        assert function.argtypes == parameters, name
        assert function.restype is ctypes.c_int, name
    del library.cublasLtMatmul
    with pytest.raises(AttributeError):
        cublaslt.declare(library)


def _record_cdll_calls(monkeypatch, **environment: str) -> list:
    """Search for the library of a torch for CUDA 13 while nothing can be loaded; return the calls of `CDLL`."""
    calls = []

    def open_library(*arguments, **options):
        calls.append((arguments, options))
        raise OSError

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cublaslt, "HIP", False)
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cublaslt._library.__wrapped__() is None
    return calls


def test_no_second_copy_of_the_library_is_loaded(monkeypatch):
    ((arguments, options),) = _record_cdll_calls(monkeypatch)
    assert arguments == ("libcublasLt.so.13",)
    assert options["mode"] & os.RTLD_NOLOAD


def test_environment_variable_switches_cublaslt_off(monkeypatch):
    assert _record_cdll_calls(monkeypatch, TIGON_CUBLASLT="0") == []
    assert "TIGON_CUBLASLT=0" in cublaslt.state()
