"""Calls of the peers for a case: Liger, Quack, fla, causal-conv1d, cut-cross-entropy, TRL, torch's fused ops.

A loader takes a case and returns a call. It imports its package, and raises `ImportError` if that is not installed and
`Unsupported` if the peer cannot compute the case.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import OPS
from benchmarks.ops.eager import Run
from benchmarks.workloads import Case

Loader = Callable[[Case], Run]


class Unsupported(Exception):
    """The provider cannot compute this case. The message says why."""


def refuse_other_options(case: Case, *options: str) -> None:
    """Raise `Unsupported` if the case has an option that is not among `options`."""
    others = [f"{key}={value}" for key, value in case.options.items() if key not in options]
    if others:
        raise Unsupported(f"no {', '.join(others)}")


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def import_path(path: str) -> Any:
    module, _, names = path.partition(":")
    try:
        return functools.reduce(getattr, names.split("."), import_module(module))
    except AttributeError as error:
        raise ImportError(f"{module} has no {names}") from error


def call(path: str, *more: Any, **settings: Any) -> Loader:
    """Return the loader of a function that gets the tensors of a case in their order, then `more`."""

    def load(case: Case) -> Run:
        function = import_path(path)
        return lambda *tensors: as_tuple(function(*tensors, *more, **settings))

    return load


def torch_function(function: Callable[[Case], Callable[..., Tensor]], *options: str) -> Loader:
    """Return the loader of a function of torch, for cases that have no other options than these."""

    def load(case: Case) -> Run:
        refuse_other_options(case, *options)
        run = function(case)
        return lambda *tensors: (run(*tensors),)

    return load


def torch_linear_cross_entropy(case: Case) -> Run:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unsupported("torch.nn.functional.linear_cross_entropy is in torch 2.13 and later")
    # Torch computes one product of all tokens, which is summed in fp32.
    refuse_other_options(case, "acc_dtype")
    return lambda input, linear_weight, target: (F.linear_cross_entropy(input, linear_weight, target),)


# --- experts -------------------------------------------------------------------------------------


def transformers_experts(case: Case) -> Run:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    compute = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    flags: dict[str, Any] = {"has_gate": True, "has_bias": False, "is_transposed": False, "num_experts": case.shape[2]}
    # transformers 5.23 reads this attribute too.
    flags |= {"_is_expert_parallel": False}

    def gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def run(x: Tensor, up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        module = SimpleNamespace(gate_up_proj=up_proj, down_proj=down_proj, _apply_gate=gate, **flags)
        return (compute(module, x, index, weights),)

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


def liger_moe_mlp(case: Case) -> Run:
    function = import_path("liger_kernel.ops:LigerFusedMoEFunction.apply")
    return lambda x, up, down, index, weights: (function(x, up, down, index.int(), weights),)


# --- norms and rope ------------------------------------------------------------------------------


def _casting(case: Case) -> tuple[float, str]:
    after_weight = case.options.get("rounding") == "after_weight"
    return case.options.get("offset", 0.0), "gemma" if after_weight else "llama"


def liger_norm(name: str) -> Loader:
    return lambda case: call(f"liger_kernel.ops:{name}.apply", 1e-6, *_casting(case), False)(case)


def liger_rope(case: Case) -> Run:
    refuse_other_options(case, "sections")
    if sections := case.options.get("sections"):
        path = "liger_kernel.transformers.qwen2vl_mrope:liger_multimodal_rotary_pos_emb"
        return call(path, list(sections))(case)
    return call("liger_kernel.transformers:liger_rotary_pos_emb")(case)


def _normalised_rope(normalise: Callable[[Tensor, Tensor], Tensor], rotate: Callable[..., Any]) -> Run:
    """Return the call of a norm of each head as it is stored, (B, S, H, D), and then of a rope."""
    heads = lambda x, weight: normalise(x.transpose(1, 2), weight).transpose(1, 2)
    return lambda q, k, q_weight, k_weight, *tables: tuple(rotate(heads(q, q_weight), heads(k, k_weight), *tables))


def liger_qk_norm_rope(case: Case) -> Run:
    refuse_other_options(case, "offset", "rounding")
    function, (offset, casting) = import_path("liger_kernel.ops:LigerRMSNormFunction.apply"), _casting(case)
    normalise = lambda x, weight: function(x, weight, 1e-6, offset, casting, False)
    return _normalised_rope(normalise, import_path("liger_kernel.transformers:liger_rotary_pos_emb"))


def quack_norm(case: Case) -> Run:
    function, offset = import_path("quack:rmsnorm"), case.options.get("offset", 0.0)
    if case.op == "rms_norm":
        return lambda x, weight: (function(x, weight, eps=1e-6, weight_offset=offset),)
    return lambda x, residual, weight: function(
        x, weight, residual=residual, eps=1e-6, prenorm=True, weight_offset=offset
    )


def quack_rope(case: Case) -> Run:
    function = import_path("quack.rotary:apply_rotary_emb")
    refuse_other_options(case, "offset", "rounding")

    # x is [B, H, S, D]; Quack expects [B, S, H, D] and tables of shape [S, D / 2].
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (table[0, :, : table.shape[-1] // 2] for table in (cos, sin))
        return function(x.transpose(1, 2), cos, sin).transpose(1, 2)

    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


def quack_qk_norm_rope(case: Case) -> Run:
    rotate, function, offset = quack_rope(case), import_path("quack:rmsnorm"), case.options.get("offset", 0.0)
    return _normalised_rope(lambda x, weight: function(x, weight, eps=1e-6, weight_offset=offset), rotate)


def fla_gated_rms_norm(case: Case) -> Run:
    """Load the kernel of gated delta networks (gate last), or that of Mamba 2 (groups, and either order)."""
    refuse_other_options(case, "gate_first", "group_size")
    if not case.options:
        return call("fla.modules.norm.fused_norm_gate:rms_norm_gated", None)(case)
    function = import_path("fla.modules.norm.layernorm_gated:rmsnorm_fn")
    size, norm_first = case.options.get("group_size"), not case.options.get("gate_first", False)
    return lambda x, gate, weight: (function(x, weight, None, gate, group_size=size, norm_before_gate=norm_first),)


# --- recurrent layers ----------------------------------------------------------------------------


def fla_delta_rule(case: Case) -> Run:
    path = "fla.ops.kda:chunk_kda" if case.op == "kda" else "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
    function = import_path(path)
    refuse_other_options(case, "use_qk_l2norm")
    options = {"use_qk_l2norm_in_kernel": case.options.get("use_qk_l2norm", False)}

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor | None = None) -> tuple[Tensor]:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return (function(q, k, v, g, beta, cu_seqlens=None if bounds is None else bounds.long(), **options)[0],)

    return run


def convolution(load: Callable[[], Callable[..., Tensor]]) -> Loader:
    """Return the loader of a convolution with SiLU of x [B, C, T], a weight and a bias."""

    def load_case(case: Case) -> Run:
        refuse_other_options(case, "bias", "channels_last")
        convolve = load()
        view = (lambda x: x.mT) if case.options.get("channels_last", True) else (lambda x: x)
        return lambda x, weight, bias=None: (view(convolve(view(x), weight, bias)),)

    return load_case


def stock_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve as transformers does without other packages."""
    channels, taps = weight.shape
    return F.silu(F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=channels)[..., : x.shape[-1]])


def imported_convolution() -> Callable[..., Tensor]:
    return functools.partial(import_path("causal_conv1d:causal_conv1d_fn"), activation="silu")


# --- activations and losses ----------------------------------------------------------------------


def liger_geglu(case: Case) -> Run:
    if case.options.get("approximate") != "tanh":
        raise Unsupported("tanh only")
    return call("liger_kernel.ops:LigerGELUMulFunction.apply")(case)


def _liger_loss(
    path: str, arguments: Callable[[Case], dict[str, Any]], run: Callable[..., Any], *options: str
) -> Loader:
    """Return the loader of a loss module: `run` calls the module of the `arguments` with the tensors of a case. The
    module knows these options of a case."""

    def load(case: Case) -> Run:
        refuse_other_options(case, *options)
        loss = import_path(f"liger_kernel.{path}")(**arguments(case))
        return lambda *tensors: as_tuple(run(loss, *tensors))[:1]

    return load


def _liger_logits_loss(name: str, *options: str, **settings: Any) -> Loader:
    arguments = lambda case: {**settings, **case.options}
    return _liger_loss(f"transformers:{name}", arguments, lambda loss, *tensors: loss(*tensors), *options)


def _liger_alignment(name: str, run: Callable[..., Any], *unknown: str, **settings: Any) -> Loader:
    """Return the loader of a loss of alignment, which does not have the options `unknown` of the op."""
    options = lambda case: {key: x for key, x in OPS[case.op].bench_options.items() if key not in unknown}
    return _liger_loss(f"chunked_loss:LigerFusedLinear{name}Loss", lambda case: {**options(case), **settings}, run)


def liger_jsd(case: Case) -> Run:
    refuse_other_options(case, "beta", "from_logits")
    loss = import_path("liger_kernel.transformers:LigerJSD")(beta=case.options.get("beta", 0.5))
    # LigerJSD accepts log-probabilities only, so torch's log_softmax converts logits, as in Liger's distillation code.
    convert = F.log_softmax if case.options.get("from_logits") else lambda x, dim: x
    return lambda input, target: (loss(convert(input, -1), convert(target, -1)),)


LIGER_LOSSES: dict[str, Loader] = {
    # It overwrites its logits.
    "cross_entropy": _liger_loss(
        "transformers:LigerCrossEntropyLoss", lambda case: {}, lambda loss, input, target: loss(input.clone(), target)
    ),
    "kl_div": _liger_logits_loss("LigerKLDIVLoss", "log_target", reduction="batchmean"),
    "jsd": liger_jsd,
    "tvd": _liger_logits_loss("LigerTVDLoss", reduction="batchmean"),
    "linear_cross_entropy": _liger_loss(
        "transformers:LigerFusedLinearCrossEntropyLoss",
        lambda case: {"softcap": case.options.get("softcap"), "accum_dtype": case.options.get("acc_dtype")},
        lambda loss, x, w, targets: loss(w, x, targets), "softcap", "acc_dtype",
    ),
    "linear_distillation": _liger_loss(
        "transformers:LigerFusedLinearJSD",
        lambda case: {"jsd_beta": case.options.get("beta", 0.5), "temperature": case.options.get("temperature", 1.0)},
        lambda loss, x, w, targets, teacher_x, teacher_w: loss(x, w, teacher_x, teacher_w, targets),
        "beta", "temperature", "fp32_logits",
    ),
    "dpo_loss": _liger_alignment(
        "DPO", lambda loss, x, w, targets, ref_x, ref_w: loss(w, x, targets, ref_input=ref_x, ref_weight=ref_w)
    ),
    "orpo_loss": _liger_alignment("ORPO", lambda loss, x, w, targets: loss(w, x, targets)),
    # By default it adds the NLL of the chosen completions.
    "simpo_loss": _liger_alignment("SimPO", lambda loss, x, w, targets: loss(w, x, targets), compute_nll_loss=False),
    "kto_loss": _liger_alignment(
        "KTO",
        lambda loss, x, w, targets, labels, ref_x, ref_w, kl: loss(
            x, w, targets, preference_labels=labels, ref_input=ref_x, ref_weight=ref_w, kl=kl.expand(len(labels))
        ),
        use_ref_model=True,
    ),
    # It takes a mask in place of ignored targets.
    "grpo_loss": _liger_alignment(
        "GRPO",
        lambda loss, x, w, targets, advantages, old, ref: loss(
            x, w, targets.clamp(min=0), (targets != -100).to(ref.dtype), advantages, ref_per_token_logps=ref,
            old_per_token_logps=old,
        ),
        "use_bias_correction_kl",
    ),
}  # fmt: skip


def liger_cute(name: str) -> Loader:
    """Return the loader of Liger's functional API, which uses its CuTe kernels if nvidia-cutlass-dsl is installed."""

    def load(case: Case) -> Run:
        # Without cutlass the API would run the kernels of the provider "liger".
        import_module("cutlass")
        path, (offset, casting) = f"liger_kernel.functional:{name}", _casting(case)
        if name in ("rms_norm", "fused_add_rms_norm"):
            return call(path, eps=1e-6, offset=offset, casting_mode=casting)(case)
        if name == "layer_norm":
            return call(path, 1e-5)(case)
        return call(path, **({"reduction": "batchmean", **case.options} if name == "kl_div" else {}))(case)

    return load


def quack_linear_cross_entropy(case: Case) -> Run:
    # Quack always sums in fp32.
    refuse_other_options(case, "acc_dtype")
    # Version 0.6.5 raises if the chunk, 4096 by default, equals H.
    chunk = 4096 if case.shape[1] != 4096 else 8192
    return call("quack.linear_cross_entropy:chunked_linear_cross_entropy", chunk_size=chunk)(case)


def cce(case: Case) -> Run:
    refuse_other_options(case, "softcap")
    return call("cut_cross_entropy:linear_cross_entropy", impl="cce", softcap=case.options.get("softcap"))(case)


def trl_linear_log_probs(case: Case) -> Run:
    """Load the chunked log-probabilities of TRL's trainers, which score only the valid positions, or their loss. The
    backward pass of the function imports `trl.trainer.utils`, which needs accelerate, datasets and pandas."""
    utils = import_module("trl.trainer.utils")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        raise Unsupported("this version of TRL has no trl.trainer.utils._ChunkedLogProbFunction")
    function, chunk_size = utils._ChunkedLogProbFunction, getattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    is_loss, options = case.op == "linear_cross_entropy", case.options
    # TRL always sums in fp32.
    known = ("softcap", "return_entropy", *(("acc_dtype", "return_log_probs") if is_loss else ("temperature",)))
    refuse_other_options(case, *known)
    outputs = ("entropy",) if options.get("return_entropy") else ()
    temperature, logit_scale = float(options.get("temperature", 1.0)), 1.0

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        valid = targets != -100
        log_probs, entropy, *_ = function.apply(
            hidden[valid], weight, None, targets[valid], temperature, chunk_size, options.get("softcap"), logit_scale,
            outputs,
        )  # fmt: skip
        returns_log_probs = not is_loss or bool(options.get("return_log_probs"))
        results = [log_probs] * returns_log_probs + [entropy] * bool(outputs)
        scattered = [values.new_zeros(targets.shape).masked_scatter(valid, values) for values in results]
        loss = [-log_probs.sum() / valid.sum().clamp(min=1)] if is_loss else []
        return (*loss, *scattered)

    return run


def trl_linear_distillation(case: Case) -> Run:
    """Load the divergence of TRL's distillation trainer; as there, only the valid positions are computed."""
    module = import_module("trl.trainer.distillation_trainer")
    if not hasattr(module, "ChunkedDivergenceFunction"):
        raise Unsupported("this version of TRL has no trl.trainer.distillation_trainer.ChunkedDivergenceFunction")
    refuse_other_options(case, "beta", "temperature", "fp32_logits")
    beta, temperature = case.options.get("beta", 0.5), case.options.get("temperature", 1.0)

    def run(
        hidden: Tensor, weight: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> tuple[Tensor]:
        valid = targets != -100
        divergence, _ = module.ChunkedDivergenceFunction.apply(
            hidden[valid], weight, None, teacher_hidden[valid], teacher_weight, None, beta, temperature,
            1.0, None, 1.0, None,
        )  # fmt: skip
        return (divergence.sum() / valid.sum().clamp(min=1),)

    return run
