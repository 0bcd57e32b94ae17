"""Tigon: GPU kernels that make LLM training faster and lighter, exactly.

import tigon
tigon.patch(model)   # any Hugging Face decoder: norms, MLPs, rotary embedding and the loss

The ops are here as functions and modules; what needs transformers is imported when it is first used.
"""

import importlib

from tigon.ops.cross_entropy import CrossEntropyLoss, LossOutput, cross_entropy
from tigon.ops.glu import GEGLUMLP, SwiGLUMLP, geglu, swiglu
from tigon.ops.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from tigon.ops.rms_norm import RMSNorm, rms_norm
from tigon.ops.rope import rope

__version__ = "0.1.0"

_LAZY = {"patch": "tigon.hf", "patched": "tigon.hf", "AutoModelForCausalLM": "tigon.hf"}

__all__ = [
    "GEGLUMLP",
    "AutoModelForCausalLM",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "LossOutput",
    "RMSNorm",
    "SwiGLUMLP",
    "cross_entropy",
    "geglu",
    "linear_cross_entropy",
    "patch",
    "patched",
    "rms_norm",
    "rope",
    "swiglu",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tigon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
