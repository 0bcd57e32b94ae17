"""Tigon: GPU kernels that make LLM training faster and reduce its memory, without approximations.

    # Replace norms, MLPs, rotary embeddings and the loss of any decoder of transformers.
    tigon.patch(model)

This package exports the ops as functions and modules. Every name is imported when it is first used, so `import tigon`
takes a few milliseconds, and only names that need transformers import transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tigon.runtime.requirements import needs_triton, require

require("tigon", "torch", *(["triton"] if needs_triton() else []))

if TYPE_CHECKING:
    # Type checkers see the signatures of the names that are imported when they are first used.
    from tigon import hf as hf
    from tigon import integrations as integrations
    from tigon import losses as losses
    from tigon import memory as memory
    from tigon import ops as ops
    from tigon import recognition as recognition
    from tigon import testing as testing
    from tigon.hf import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    # `tigon.hf.patch` is a module too, and the pages of the reference would describe the module.
    from tigon.hf.patch import patch, patched
    from tigon.integrations.liger import install_as_liger_kernel
    from tigon.losses.distillation import DistillationLoss
    from tigon.losses.modules import CPOLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, PPOLoss, RLOOLoss, SimPOLoss
    from tigon.memory.lean import lean
    from tigon.memory.levels import Memory
    from tigon.ops.adapters.lora import lora_linear
    from tigon.ops.adapters.lora_experts import lora_moe_mlp
    from tigon.ops.experts.load_balancing import load_balancing_loss
    from tigon.ops.experts.moe_mlp import moe_mlp
    from tigon.ops.fp8.fp8_linear import fp8_linear
    from tigon.ops.head.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
    from tigon.ops.head.linear_distillation import DistillationOutput, linear_distillation
    from tigon.ops.head.linear_log_probs import LogProbOutput, linear_log_probs
    from tigon.ops.head.linear_loss import linear_loss
    from tigon.ops.logits.cross_entropy import CrossEntropyLoss, cross_entropy
    from tigon.ops.logits.divergences import JSDLoss, KLDivLoss, TVDLoss, jsd, kl_div, tvd
    from tigon.ops.logits.loss_arguments import LossOutput
    from tigon.ops.logits.softmax import Softmax, softmax
    from tigon.ops.logits.valid_rows import ValidRows
    from tigon.ops.mixers.causal_conv1d import causal_conv1d
    from tigon.ops.mixers.gated_delta_rule import gated_delta_rule
    from tigon.ops.mixers.kda import kda
    from tigon.ops.mixers.ssd import ssd
    from tigon.ops.mlps.activations import gelu, relu2
    from tigon.ops.mlps.glu import geglu, swiglu
    from tigon.ops.mlps.glu_mlp import GEGLUMLP, SwiGLUMLP, glu_mlp
    from tigon.ops.mlps.mlp import ReLU2MLP, mlp
    from tigon.ops.norms.gated_rms_norm import gated_rms_norm
    from tigon.ops.norms.layer_norm import LayerNorm, layer_norm
    from tigon.ops.norms.rms_norm import RMSNorm, add_rms_norm, rms_norm
    from tigon.ops.optim.adamw import AdamW
    from tigon.ops.optim.in_backward import step_in_backward
    from tigon.ops.optim.muon import Muon
    from tigon.ops.optim.muon_groups import muon_groups
    from tigon.ops.rotary.qk_norm_rope import qk_norm_rope
    from tigon.ops.rotary.rope import rope

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "tigon.hf": (
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoModelForSequenceClassification",
    ),
    "tigon.hf.patch": ("patch", "patched"),
    "tigon.integrations.liger": ("install_as_liger_kernel",),
    "tigon.losses.distillation": ("DistillationLoss",),
    "tigon.losses.modules": (
        "CPOLoss",
        "DPOLoss",
        "GRPOLoss",
        "KTOLoss",
        "ORPOLoss",
        "PPOLoss",
        "RLOOLoss",
        "SimPOLoss",
    ),
    "tigon.memory.lean": ("lean",),
    "tigon.memory.levels": ("Memory",),
    "tigon.ops.adapters.lora": ("lora_linear",),
    "tigon.ops.adapters.lora_experts": ("lora_moe_mlp",),
    "tigon.ops.experts.load_balancing": ("load_balancing_loss",),
    "tigon.ops.experts.moe_mlp": ("moe_mlp",),
    "tigon.ops.fp8.fp8_linear": ("fp8_linear",),
    "tigon.ops.head.linear_cross_entropy": ("LinearCrossEntropyLoss", "linear_cross_entropy"),
    "tigon.ops.head.linear_distillation": ("DistillationOutput", "linear_distillation"),
    "tigon.ops.head.linear_log_probs": ("LogProbOutput", "linear_log_probs"),
    "tigon.ops.head.linear_loss": ("linear_loss",),
    "tigon.ops.logits.cross_entropy": ("CrossEntropyLoss", "cross_entropy"),
    "tigon.ops.logits.divergences": ("JSDLoss", "KLDivLoss", "TVDLoss", "jsd", "kl_div", "tvd"),
    "tigon.ops.logits.loss_arguments": ("LossOutput",),
    "tigon.ops.logits.softmax": ("Softmax", "softmax"),
    "tigon.ops.logits.valid_rows": ("ValidRows",),
    "tigon.ops.mixers.causal_conv1d": ("causal_conv1d",),
    "tigon.ops.mixers.gated_delta_rule": ("gated_delta_rule",),
    "tigon.ops.mixers.kda": ("kda",),
    "tigon.ops.mixers.ssd": ("ssd",),
    "tigon.ops.mlps.activations": ("gelu", "relu2"),
    "tigon.ops.mlps.glu": ("geglu", "swiglu"),
    "tigon.ops.mlps.glu_mlp": ("GEGLUMLP", "SwiGLUMLP", "glu_mlp"),
    "tigon.ops.mlps.mlp": ("ReLU2MLP", "mlp"),
    "tigon.ops.norms.gated_rms_norm": ("gated_rms_norm",),
    "tigon.ops.norms.layer_norm": ("LayerNorm", "layer_norm"),
    "tigon.ops.norms.rms_norm": ("RMSNorm", "add_rms_norm", "rms_norm"),
    "tigon.ops.optim.adamw": ("AdamW",),
    "tigon.ops.optim.in_backward": ("step_in_backward",),
    "tigon.ops.optim.muon": ("Muon",),
    "tigon.ops.optim.muon_groups": ("muon_groups",),
    "tigon.ops.rotary.qk_norm_rope": ("qk_norm_rope",),
    "tigon.ops.rotary.rope": ("rope",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
# Modules that are imported when they are first used.
_LAZY_MODULES = ("hf", "integrations", "losses", "memory", "ops", "recognition", "testing")

__all__ = [
    "GEGLUMLP",
    "AdamW",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "CPOLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DistillationLoss",
    "DistillationOutput",
    "GRPOLoss",
    "JSDLoss",
    "KLDivLoss",
    "KTOLoss",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LogProbOutput",
    "LossOutput",
    "Memory",
    "Muon",
    "ORPOLoss",
    "PPOLoss",
    "RLOOLoss",
    "RMSNorm",
    "ReLU2MLP",
    "SimPOLoss",
    "Softmax",
    "SwiGLUMLP",
    "TVDLoss",
    "ValidRows",
    "add_rms_norm",
    "causal_conv1d",
    "cross_entropy",
    "fp8_linear",
    "gated_delta_rule",
    "gated_rms_norm",
    "geglu",
    "gelu",
    "glu_mlp",
    "install_as_liger_kernel",
    "jsd",
    "kda",
    "kl_div",
    "layer_norm",
    "lean",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "linear_loss",
    "load_balancing_loss",
    "lora_linear",
    "lora_moe_mlp",
    "mlp",
    "moe_mlp",
    "muon_groups",
    "patch",
    "patched",
    "qk_norm_rope",
    "relu2",
    "rms_norm",
    "rope",
    "softmax",
    "ssd",
    "step_in_backward",
    "swiglu",
    "tvd",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in _LAZY_MODULES:
        value = importlib.import_module(f"tigon.{name}")
    else:
        raise AttributeError(f"module 'tigon' has no attribute {name!r}")
    # Python calls this function only for names that are not in the module, so each name is looked up here once.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY_MODULES})
