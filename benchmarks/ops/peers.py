"""Calls of the peers for a case: Liger, Quack, fla (flash-linear-attention), cut-cross-entropy, TRL, torch's fused ops.

A loader imports its package and returns the call. It raises `ImportError` if the package is not installed, and
`Unsupported` if the peer cannot compute the case.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import Case

Run = Callable[..., tuple[Tensor, ...]]


class Unsupported(Exception):
    """The provider cannot compute this case. The message says why."""


def refuse_other_options(case: Case, *options: str) -> None:
    """Raise `Unsupported` if the case has an option that is not among `options`."""
    others = [f"{key}={value}" for key, value in case.options.items() if key not in options]
    if others:
        raise Unsupported(f"no {', '.join(others)}")


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# --- torch's own ---------------------------------------------------------------------------------


def torch_rms_norm(case: Case) -> Run:
    refuse_other_options(case)
    return lambda x, weight: (F.rms_norm(x, weight.shape, weight, 1e-6),)


def torch_softmax(case: Case) -> Run:
    return lambda x: (F.softmax(x, -1),)


def torch_cross_entropy(case: Case) -> Run:
    return lambda input, target: (F.cross_entropy(input, target),)


def torch_linear_cross_entropy(case: Case) -> Run:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unsupported("torch.nn.functional.linear_cross_entropy is in torch 2.13 and later")
    # Torch computes one product of all tokens, which is summed in fp32.
    refuse_other_options(case, "acc_dtype")
    return lambda input, linear_weight, target: (F.linear_cross_entropy(input, linear_weight, target),)


def transformers_experts(case: Case, name: str = "grouped_mm") -> Run:
    """Return an implementation of experts by the name that the config of a transformers model has for it."""
    from tigon.hf.transformers_private import experts_function

    try:
        compute = experts_function(name)
    except RuntimeError as error:
        raise Unsupported(str(error)) from error
    flags: dict[str, Any] = {"has_gate": True, "has_bias": False, "is_transposed": False, "num_experts": case.shape[2]}
    # transformers 5.23 reads the first of these attributes too, and its call of SonicMoE reads the second one.
    flags |= {"_is_expert_parallel": False, "config": SimpleNamespace(hidden_act="silu")}

    def gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def run(x: Tensor, up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        module = SimpleNamespace(gate_up_proj=up_proj, down_proj=down_proj, _apply_gate=gate, **flags)
        return (compute(module, x, index, weights),)

    return run


def sonicmoe_experts(case: Case) -> Run:
    """Return SonicMoE: of the package sonic-moe if it is installed, otherwise as transformers loads it.

    The package tries many configurations of each product at the first call, which takes minutes.
    """
    if find_spec("sonicmoe") is None:
        return transformers_experts(case, "sonicmoe")
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    refuse_other_options(case)

    def run(x: Tensor, up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        choices = index.shape[1]
        tokens = torch.arange(len(x), dtype=torch.int32, device=x.device).repeat_interleave(choices)
        # The weights have their dimensions in another order, and `concat_layout` says that gate and up are packed.
        y, _ = moe_general_routing_inputs(
            x, weights.flatten().to(x.dtype), tokens, index.flatten().int(), up_proj.permute(1, 2, 0), None,
            down_proj.permute(1, 2, 0), None, E=len(up_proj), stream_id=None, activation_type=ActivationType.SWIGLU,
            is_inference_mode_enabled=False, concat_layout=True,
        )  # fmt: skip
        return (y,)

    return run


def peft_experts(case: Case) -> Run:
    """Add the adapters to the weights as PEFT does for `target_parameters`, and run the experts of transformers."""
    experts, scalings = transformers_experts(case), [case.options.get(f"{n}_scaling", 1.0) for n in ("up", "down")]

    def run(
        x: Tensor, up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor, *factors: Tensor
    ) -> tuple[Tensor, ...]:
        sums = [
            torch.baddbmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scaling)
            for weight, a, b, scaling in zip((up_proj, down_proj), factors[::2], factors[1::2], scalings, strict=True)
        ]
        return experts(x, *sums, index, weights)

    return run


def torch_kl_div(case: Case) -> Run:
    return lambda input, target: (F.kl_div(input, target, reduction="batchmean", **case.options),)


# --- Liger: the autograd functions and modules that its patched models run ------------------------


def _casting(case: Case) -> tuple[float, str]:
    after_weight = case.options.get("rounding") == "after_weight"
    return case.options.get("offset", 0.0), "gemma" if after_weight else "llama"


def liger_rms_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerRMSNormFunction

    offset, casting = _casting(case)
    return lambda x, weight: (LigerRMSNormFunction.apply(x, weight, 1e-6, offset, casting, False),)


def liger_add_rms_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    offset, casting = _casting(case)
    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, 1e-6, offset, casting, False
    )


def liger_layer_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias: (LigerLayerNormFunction.apply(x, weight, bias, 1e-5),)


def liger_rope(case: Case) -> Run:
    from liger_kernel.transformers import liger_rotary_pos_emb
    from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb

    refuse_other_options(case, "sections")
    if sections := case.options.get("sections"):
        return lambda q, k, cos, sin: tuple(liger_multimodal_rotary_pos_emb(q, k, cos, sin, list(sections)))
    return lambda q, k, cos, sin: tuple(liger_rotary_pos_emb(q, k, cos, sin))


def liger_qk_norm_rope(case: Case) -> Run:
    """Load Liger's norm, which reads each head as it is stored, (B, S, H, D), and then Liger's rope."""
    from liger_kernel.ops import LigerRMSNormFunction
    from liger_kernel.transformers import liger_rotary_pos_emb

    refuse_other_options(case, "offset", "rounding")
    offset, casting = _casting(case)

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x.transpose(1, 2), weight, 1e-6, offset, casting, False).transpose(1, 2)

    return lambda q, k, q_weight, k_weight, cos, sin: tuple(
        liger_rotary_pos_emb(normalise(q, q_weight), normalise(k, k_weight), cos, sin)
    )


def liger_swiglu(case: Case) -> Run:
    from liger_kernel.ops import LigerSiLUMulFunction

    return lambda gate, up: (LigerSiLUMulFunction.apply(gate, up),)


def liger_geglu(case: Case) -> Run:
    from liger_kernel.ops import LigerGELUMulFunction

    if case.options.get("approximate") != "tanh":
        raise Unsupported("tanh only")
    return lambda gate, up: (LigerGELUMulFunction.apply(gate, up),)


def liger_relu2(case: Case) -> Run:
    from liger_kernel.ops import LigerReLUSquaredFunction

    return lambda x: (LigerReLUSquaredFunction.apply(x),)


def liger_moe_mlp(case: Case) -> Run:
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda x, up, down, index, weights: (LigerFusedMoEFunction.apply(x, up, down, index.int(), weights),)


def transformers_load_balancing_loss(case: Case) -> Run:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts, top_k = case.options["num_experts"], case.options["top_k"]
    return lambda router_logits: (load_balancing_loss_func(router_logits.unbind(), experts, top_k),)


def liger_softmax(case: Case) -> Run:
    from liger_kernel.ops import LigerSoftmaxFunction

    return lambda x: (LigerSoftmaxFunction.apply(x),)


def liger_cross_entropy(copy: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss()
        return lambda input, target: (loss(input.clone() if copy else input, target),)

    return load


def liger_linear_cross_entropy(accum_dtype: torch.dtype | None) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        refuse_other_options(case, "softcap", "acc_dtype")
        dtype = accum_dtype or case.options.get("acc_dtype")
        loss = LigerFusedLinearCrossEntropyLoss(softcap=case.options.get("softcap"), accum_dtype=dtype)
        return lambda input, linear_weight, target: (loss(linear_weight, input, target),)

    return load


def liger_kl_div(case: Case) -> Run:
    from liger_kernel.transformers import LigerKLDIVLoss

    refuse_other_options(case, "log_target")
    loss = LigerKLDIVLoss(reduction="batchmean", **case.options)
    return lambda input, target: (loss(input, target),)


def liger_jsd(case: Case) -> Run:
    from liger_kernel.transformers import LigerJSD

    refuse_other_options(case, "beta", "from_logits")
    loss = LigerJSD(beta=case.options.get("beta", 0.5))
    # LigerJSD accepts log-probabilities only, so torch's log_softmax converts logits, as in Liger's distillation code.
    convert = F.log_softmax if case.options.get("from_logits") else lambda x, dim: x
    return lambda input, target: (loss(convert(input, -1), convert(target, -1)),)


def liger_tvd(case: Case) -> Run:
    from liger_kernel.transformers import LigerTVDLoss

    refuse_other_options(case)
    loss = LigerTVDLoss(reduction="batchmean")
    return lambda input, target: (loss(input, target),)


def liger_cute(name: str) -> Callable[[Case], Run]:
    """Return the loader of Liger's functional API, which uses its CuTe kernels if nvidia-cutlass-dsl is installed."""

    def load(case: Case) -> Run:
        # Without cutlass the API would run the kernels of the provider "liger".
        import cutlass  # noqa: F401
        from liger_kernel import functional

        function, (offset, casting) = getattr(functional, name), _casting(case)
        if name in ("rms_norm", "fused_add_rms_norm"):
            return lambda *tensors: _tuple(function(*tensors, eps=1e-6, offset=offset, casting_mode=casting))
        if name == "layer_norm":
            return lambda x, weight, bias: (function(x, weight, bias, 1e-5),)
        if name == "kl_div":
            return lambda input, target: (function(input, target, reduction="batchmean", **case.options),)
        return lambda *tensors: _tuple(function(*tensors))

    return load


# --- flash-linear-attention ----------------------------------------------------------------------


def fla_gated_rms_norm(case: Case) -> Run:
    """Load the kernel of gated delta networks (gate last), or that of Mamba 2 (groups, and either order)."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm_gated import rmsnorm_fn

    refuse_other_options(case, "gate_first", "group_size")
    if not case.options:
        return lambda x, gate, weight: (rms_norm_gated(x, gate, weight, None),)
    size, norm_first = case.options.get("group_size"), not case.options.get("gate_first", False)
    return lambda x, gate, weight: (rmsnorm_fn(x, weight, None, gate, group_size=size, norm_before_gate=norm_first),)


# --- Quack ---------------------------------------------------------------------------------------


def quack_rms_norm(case: Case) -> Run:
    import quack

    offset = case.options.get("offset", 0.0)
    return lambda x, weight: (quack.rmsnorm(x, weight, eps=1e-6, weight_offset=offset),)


def quack_add_rms_norm(case: Case) -> Run:
    import quack

    offset = case.options.get("offset", 0.0)
    return lambda x, residual, weight: quack.rmsnorm(
        x, weight, residual=residual, eps=1e-6, prenorm=True, weight_offset=offset
    )


def _quack_rotation(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from quack.rotary import apply_rotary_emb

    refuse_other_options(case, "offset", "rounding")

    # x is [B, H, S, D]; Quack expects [B, S, H, D] and tables of shape [S, D / 2].
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (table[0, :, : table.shape[-1] // 2] for table in (cos, sin))
        return apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2)

    return rotate


def quack_rope(case: Case) -> Run:
    rotate = _quack_rotation(case)
    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


def quack_qk_norm_rope(case: Case) -> Run:
    import quack

    rotate, offset = _quack_rotation(case), case.options.get("offset", 0.0)

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return quack.rmsnorm(x.transpose(1, 2), weight, eps=1e-6, weight_offset=offset).transpose(1, 2)

    return lambda q, k, q_weight, k_weight, cos, sin: (
        rotate(normalise(q, q_weight), cos, sin),
        rotate(normalise(k, k_weight), cos, sin),
    )


def quack_softmax(case: Case) -> Run:
    import quack

    return lambda x: (quack.softmax(x),)


def quack_cross_entropy(inplace: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        import quack

        return lambda input, target: (quack.cross_entropy(input, target, inplace_backward=inplace),)

    return load


def quack_linear_cross_entropy(case: Case) -> Run:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    # Quack always sums in fp32.
    refuse_other_options(case, "acc_dtype")
    # Version 0.6.5 raises if the chunk, 4096 by default, equals H.
    chunk = 4096 if case.shape[1] != 4096 else 8192
    return lambda input, linear_weight, target: (
        chunked_linear_cross_entropy(input, linear_weight, target, chunk_size=chunk),
    )


# --- cut-cross-entropy and TRL ---------------------------------------------------------------------


def cce(exact: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from cut_cross_entropy import linear_cross_entropy

        refuse_other_options(case, "softcap")
        options: dict[str, Any] = {"impl": "cce", "softcap": case.options.get("softcap")}
        if exact:
            options["filter_eps"] = None
        return lambda input, linear_weight, target: (linear_cross_entropy(input, linear_weight, target, **options),)

    return load


def _trl_function() -> tuple[Any, int]:
    """Return TRL's chunked log-probabilities and the width of its chunks.

    The module that defines the function needs little, but its backward pass imports `trl.trainer.utils`, which needs
    accelerate, datasets, huggingface_hub and pandas.
    """
    # `from trl.trainer import utils` would raise an error that does not name the missing package.
    utils = import_module("trl.trainer.utils")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        raise Unsupported("this version of TRL has no trl.trainer.utils._ChunkedLogProbFunction")
    return utils._ChunkedLogProbFunction, getattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)


def trl_linear_log_probs(case: Case) -> Run:
    """Load the chunked log-probabilities of TRL's trainers; as there, only the valid positions are scored."""
    function, chunk_size = _trl_function()
    refuse_other_options(case, "softcap", "temperature", "return_entropy")
    softcap, temperature = case.options.get("softcap"), float(case.options.get("temperature", 1.0))
    outputs = ("entropy",) if case.options.get("return_entropy") else ()

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        valid = targets != -100
        results = function.apply(
            hidden[valid], weight, None, targets[valid], temperature, chunk_size, softcap, 1.0, outputs
        )
        return tuple(
            values.new_zeros(targets.shape).masked_scatter(valid, values) for values in results if values is not None
        )

    return run


def trl_linear_cross_entropy(case: Case) -> Run:
    """Load the loss of TRL's chunked log-probabilities; as in its trainers, only the valid positions are scored."""
    function, chunk_size = _trl_function()
    # TRL always sums in fp32.
    refuse_other_options(case, "softcap", "acc_dtype", "return_log_probs", "return_entropy")
    softcap, returns_log_probs, returns_entropy = (
        case.options.get(name) for name in ("softcap", "return_log_probs", "return_entropy")
    )
    outputs = ("entropy",) if returns_entropy else ()
    temperature = logit_scale = 1.0

    def run(input: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        valid = target != -100
        log_probs, entropy, *_ = function.apply(
            input[valid], linear_weight, None, target[valid], temperature, chunk_size, softcap, logit_scale, outputs
        )
        loss = -log_probs.sum() / valid.sum().clamp(min=1)
        results = [log_probs] * bool(returns_log_probs) + [entropy] * bool(returns_entropy)
        return loss, *(values.new_zeros(target.shape).masked_scatter(valid, values) for values in results)

    return run
