"""The table from Liger's names to Tigon's objects, for liger-kernel 0.8.5."""

from tigon.integrations.liger.apply import APPLY

__all__ = ["LIGER_VERSION", "MODULES", "NOT_SERVED"]

LIGER_VERSION = "0.8.5"

_HERE = "tigon.integrations.liger"
_PATCHING = {
    name: f"{_HERE}.apply:{name}"
    for name in (*APPLY, "_apply_liger_kernel", "_apply_liger_kernel_to_instance", "AutoLigerKernelForCausalLM")
}
_LAYERS = {
    name: f"{_HERE}.layers:{name}"
    for name in (
        "LigerCrossEntropyLoss", "LigerFusedAddRMSNorm", "LigerFusedLinearCrossEntropyLoss", "LigerRMSNorm",
    )
}  # fmt: skip
_DIRECT = {"LigerSoftmax": "tigon:Softmax"}
_MLPS = {
    name: f"{_HERE}.mlps:{name}"
    for name in (
        "LigerBlockSparseTop2MLP", "LigerDyT", "LigerFalconH1MLP", "LigerFalconH1SwiGLUMLP", "LigerGEGLUMLP",
        "LigerLayerNorm", "LigerMLP", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP", "LigerReLUSquared",
        "LigerSwiGLUMLP", "liger_rotary_pos_emb",
    )
}  # fmt: skip
_TRANSFORMERS = _PATCHING | _LAYERS | _MLPS | _DIRECT

# Module names of `liger_kernel` and the names that each of them serves.
MODULES: dict[str, dict[str, str]] = {
    "liger_kernel": {},
    "liger_kernel.transformers": _TRANSFORMERS,
    "liger_kernel.transformers.monkey_patch": _PATCHING,
    "liger_kernel.transformers.auto_model": _PATCHING,
    "liger_kernel.transformers.cross_entropy": _LAYERS,
    "liger_kernel.transformers.fused_linear_cross_entropy": _LAYERS,
    "liger_kernel.transformers.rms_norm": _LAYERS,
    "liger_kernel.transformers.swiglu": _MLPS,
    "liger_kernel.transformers.geglu": _MLPS,
    "liger_kernel.transformers.layer_norm": _MLPS,
    "liger_kernel.transformers.rope": _MLPS,
    "liger_kernel.chunked_loss": {},
}

# What to use in place of a name that is not served.
NOT_SERVED = {
    "LigerFusedLinearDPOLoss": "use tigon.DPOLoss",
    "LigerFusedLinearCPOLoss": "use tigon.CPOLoss",
    "LigerFusedLinearORPOLoss": "use tigon.ORPOLoss",
    "LigerFusedLinearSimPOLoss": "use tigon.SimPOLoss",
    "LigerFusedLinearKTOLoss": "use tigon.KTOLoss",
    "LigerFusedLinearGRPOLoss": "use tigon.GRPOLoss",
    "LigerJSD": "use tigon.JSDLoss",
    "LigerKLDIVLoss": "use tigon.KLDivLoss",
    "LigerTVDLoss": "use tigon.TVDLoss",
}
