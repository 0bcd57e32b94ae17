"""The functions of `liger_kernel.utils` that programs use: the name of the device, and which packages there are."""

import importlib.util

import torch


def is_peft_available() -> bool:
    """Return whether peft can be imported."""
    return importlib.util.find_spec("peft") is not None


def is_transformers_available() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


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
