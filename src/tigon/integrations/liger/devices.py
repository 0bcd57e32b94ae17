"""The functions of `liger_kernel.utils` that name the device, its memory, and the installed packages."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import distributed


def is_peft_available() -> bool:
    """Return whether peft can be imported."""
    return importlib.util.find_spec("peft") is not None


def is_npu_available() -> bool:
    """Return whether torch has an Ascend NPU."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def infer_device() -> str:
    """Return "cuda" (also for AMD), "npu", "xpu" or "cpu", the first that is available."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


# The names of Liger for generations of GPUs.
_NVIDIA = {
    (7, 0): "volta_turing", (7, 5): "volta_turing", (8, 0): "ampere_ada", (8, 6): "ampere_ada", (8, 9): "ampere_ada",
    (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell_ultra", (12, 0): "blackwell_consumer",
}  # fmt: skip
_AMD = {
    "gfx908": "cdna", "gfx90a": "cdna2", "gfx940": "cdna3", "gfx941": "cdna3", "gfx942": "cdna3", "gfx1100": "rdna3",
    "gfx1101": "rdna3", "gfx1102": "rdna3",
}  # fmt: skip
_OTHER = {
    "xpu": {"max": "pvc", "pvc": "pvc", "ponte": "pvc", "arc": "arc", "battlemage": "arc", "alchemist": "arc"},
    "npu": {"910": "ascend910", "310": "ascend310"},
}


def _infer_nvidia_arch(device_id: int) -> str:
    """Return the name of an NVIDIA GPU's generation, or "sm_" and its compute capability."""
    capability = torch.cuda.get_device_capability(device_id)
    return _NVIDIA.get(capability, "sm_{}{}".format(*capability))


def _infer_amd_arch(device_id: int) -> str:
    """Return the name of an AMD GPU's generation, or its target such as "gfx1200"."""
    target: str = getattr(torch.cuda.get_device_properties(device_id), "gcnArchName", "").split(":")[0]
    return _AMD.get(target, target or "cuda")


def _infer_xpu_arch(device_id: int) -> str:
    """Return "pvc" or "arc" for GPUs of Intel, or "xpu"."""
    return _by_name("xpu", device_id)


def _infer_npu_arch(device_id: int) -> str:
    """Return "ascend910" or "ascend310", or "npu"."""
    return _by_name("npu", device_id)


def _by_name(kind: str, device_id: int) -> str:
    name = getattr(torch, kind).get_device_properties(device_id).name.lower()
    return next((arch for part, arch in _OTHER[kind].items() if part in name), kind)


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """Return Liger's name for the generation of a GPU, such as "hopper", or the name of the device."""
    # A program may have put functions of its own into Liger's module.
    functions = sys.modules.get("liger_kernel.utils") or sys.modules[__name__]
    device: str = functions.infer_device()
    maker = ("amd" if torch.version.hip else "nvidia") if device == "cuda" else device
    try:
        arch: str = getattr(functions, f"_infer_{maker}_arch")(device_id)
    except Exception:
        return device
    return arch


def should_tile(n_cols: int) -> bool:
    """Return whether Liger's SwiGLU divides rows of this size into tiles. `tigon.swiglu` has one kernel for all."""
    functions = sys.modules.get("liger_kernel.ops.swiglu") or sys.modules[__name__]
    return n_cols > 8192 and bool(functions.infer_device_arch().startswith("blackwell"))


def infer_comm_backend() -> str:
    """Return the name of the first backend of torch.distributed that this build of torch has.

    Raises:
        RuntimeError: This build of torch has no backend.
    """
    checks: dict[str, Callable[[], bool]] = {
        "nccl": distributed.is_nccl_available,
        "hccl": is_npu_available,
        "xccl": distributed.is_xccl_available,
        "mpi": distributed.is_mpi_available,
        "gloo": distributed.is_gloo_available,
    }
    for name, is_available in checks.items():
        if is_available():
            return name
    raise RuntimeError(f"infer_comm_backend: torch.distributed has none of {', '.join(checks)}")


def get_total_gpu_memory() -> int:
    """Return the memory of GPU 0 in GiB, rounded down.

    Raises:
        RuntimeError: There is no GPU.
    """
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("get_total_gpu_memory: torch sees no GPU")
    return int(getattr(torch, device).get_device_properties(0).total_memory // 1024**3)


def transformers_version_dispatch(
    required_version: str, before_fn: Callable[..., Any], after_fn: Callable[..., Any],
    before_args: Sequence[Any] = (), after_args: Sequence[Any] = (), before_kwargs: Mapping[str, Any] | None = None,
    after_kwargs: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Call `after_fn` if transformers has at least the required version, and `before_fn` otherwise."""
    from packaging.version import Version

    if Version(version("transformers")) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
