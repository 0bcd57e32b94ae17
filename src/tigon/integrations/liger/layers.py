"""The norms, losses and small modules of `liger_kernel.transformers`, with Liger's constructors, on Tigon's ops."""

from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.liger import functional, rare
from tigon.integrations.liger.functional import ROUNDING, check_reduction, check_smoothing, check_temperature
from tigon.integrations.liger.signatures import module
from tigon.integrations.liger.variants import LOSS_OPTIONS, LOSS_RESULTS
from tigon.ops.mlps.activations import relu2


def _parameter(name: str, init_fn: str, size: int) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"{name}: init_fn must be 'ones' or 'zeros', got {init_fn!r}")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    """`tigon.rms_norm`. It writes to no input, whatever `in_place` is; `row_mode` has no effect."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        weight = _parameter(name, init_fn, hidden_size)
        if casting_mode not in ROUNDING:
            raise ValueError(f"{name}: casting_mode must be one of {', '.join(ROUNDING)}, got {casting_mode!r}")
        self.weight: nn.Parameter | None = weight if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerModulatedRMSNorm(LigerRMSNorm):
    """(1 + scale) * norm(x) + shift, as in diffusion transformers (Peebles and Xie, arXiv:2212.09748)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, elementwise_affine=elementwise_affine)

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return functional.liger_modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """`tigon.add_rms_norm`: returns the norm of the sum, and the sum."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


def _model_norm(name: str, model: str, constructor: str) -> type[LigerRMSNorm]:
    """Return the norm of a model, which differs from `LigerRMSNorm` by its constructor. Its weight may be left out."""

    def initialise(
        self: LigerRMSNorm, size: int | None, eps: float, offset: float, casting_mode: str, init_fn: str,
        with_scale: bool = True,
    ) -> None:  # fmt: skip
        if size is None and with_scale:
            raise ValueError(f"{type(self).__name__}: dim must be the number of features if with_scale is True")
        LigerRMSNorm.__init__(self, size or 1, eps, offset, casting_mode, init_fn, elementwise_affine=with_scale)
        vars(self)["with_scale"] = with_scale

    size = constructor.partition(",")[0].partition("=")[0]
    scale = ", with_scale" if "with_scale" in constructor else ""
    arguments = f"self, {size}, eps, offset, casting_mode, init_fn{scale}"
    init = eval(f"lambda self, {constructor}: initialise({arguments})", {"initialise": initialise})
    init.__name__ = "__init__"
    return type(
        name, (LigerRMSNorm,), {"__init__": init, "__doc__": f"The RMSNorm of {model}.", "__module__": __name__}
    )


_CENTERED = "eps=1e-6, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place={}"
_SCALED = "eps=1e-6, offset=0.0, casting_mode='{}', init_fn='ones', in_place=False"
_NORMS = {
    "ForGemma": ("Gemma", f"hidden_size, {_CENTERED.format(True)}, row_mode=None"),
    "ForGemma2": ("Gemma 2", f"hidden_size, {_CENTERED.format(False)}, row_mode=None"),
    "ForGemma3": ("Gemma 3", f"dim, {_CENTERED.format(False)}"),
    "ForGemma4": ("Gemma 4", f"dim, {_SCALED.format('gemma')}, with_scale=True"),
    "ForGlm4": ("GLM-4", f"hidden_size, {_SCALED.format('llama')}, row_mode=None"),
    "ForMuseGlimmer": ("Muse Glimmer", f"dim=None, {_SCALED.format('gemma')}, with_scale=True"),
    "ForMuseGlimmerTextCentered": ("Muse Glimmer's text", f"hidden_size, {_CENTERED.format(False)}, row_mode=None"),
    "ForOlmo2": ("OLMo 2", f"hidden_size, {_SCALED.format('llama')}, row_mode=None"),
    "ForQwen3Next": ("Qwen3-Next", f"hidden_size, {_CENTERED.format(False)}, row_mode=None"),
}
globals().update({f"LigerRMSNorm{key}": _model_norm(f"LigerRMSNorm{key}", *row) for key, row in _NORMS.items()})


class LigerMegatronRMSNorm(nn.Module):
    """`tigon.rms_norm` with the constructor of Megatron-Core's norms. `persist_layer_norm` has no effect."""

    def __init__(
        self, config: Any, hidden_size: Any, eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "RMSNorm",
    ) -> None:  # fmt: skip
        super().__init__()
        kind = getattr(config, "normalization", "RMSNorm")
        if kind != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm: config.normalization must be 'RMSNorm', got {kind!r}")
        self.config, self.eps = config, eps
        self.hidden_size = torch.Size([hidden_size] if isinstance(hidden_size, int) else hidden_size)
        self.zero_centered_gamma = zero_centered_gamma or bool(getattr(config, "layernorm_zero_centered_gamma", False))
        self._offset = float(self.zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        self.reset_parameters()
        # Megatron-Core sums the gradient of a parameter with this mark over the ranks.
        is_sharded = bool(getattr(config, "sequence_parallel", False))
        self.weight.sequence_parallel = is_sharded  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self._offset)

    def forward(self, x: Tensor) -> Tensor:
        return functional.liger_rms_norm(x, self.weight, self.eps, self._offset)

    def extra_repr(self) -> str:
        return f"hidden_size={tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerLayerNorm(nn.Module):
    """`tigon.layer_norm` with a bias. `impl`, `mode` and `backend` have no effect."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones",
        impl: str | None = None, mode: str | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _parameter("LigerLayerNorm", init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


class LigerGroupNorm(nn.Module):
    """The group norm of torch. Without `bias`, the bias starts at zero and is trained all the same."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(f"LigerGroupNorm: num_channels must be divisible by {num_groups}, got {num_channels}")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = _parameter("LigerGroupNorm", init_fn, num_channels)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        sizes = self.num_channels, self.num_groups, self.variance_epsilon
        return functional.liger_group_norm(hidden_states, self.weight, self.bias, *sizes)


def _check_kl_div(loss: Any) -> None:
    check_temperature(type(loss).__name__, loss.temperature)
    check_reduction(type(loss).__name__, loss.reduction)


def _check_vocab_parallel(loss: Any) -> None:
    name = type(loss).__name__
    check_smoothing(name, loss.label_smoothing_formula, loss.label_smoothing_mode)
    if loss.reduction != "none":
        raise ValueError(f"{name}: reduction must be 'none', got {loss.reduction!r}")
    if not 0.0 <= loss.label_smoothing < 1.0:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1), got {loss.label_smoothing!r}")


_VOCAB_PARALLEL = (
    "ignore_index=-100, label_smoothing=0.0, reduction='none', label_smoothing_formula='{}', label_smoothing_mode='{}'"
)
# The function, the parameters of the constructor and of the forward, the renamed ones, and a check of the options.
_MODULES: dict[str, tuple] = {
    "LigerCrossEntropyLoss": (
        functional.cross_entropy, f"weight=None, {LOSS_OPTIONS}, {LOSS_RESULTS}", "_input, target", {"input": "_input"},
    ),
    "LigerFusedLinearCrossEntropyLoss": (
        functional.fused_linear_cross_entropy,
        f"ce_weight=None, {LOSS_OPTIONS}, accum_dtype=None, use_token_scaling=False, {LOSS_RESULTS}",
        "lin_weight, _input, target, bias=None", {"input": "_input", "weight": "lin_weight"},
    ),
    "LigerFusedCETVDLoss": (
        functional.fused_ce_tvd, "ignore_index=-100", "student_logits, teacher_logits, target",
    ),
    "LigerFusedLinearJSD": (
        functional.fused_linear_jsd, "jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None",
        "student_input, student_weight, teacher_input, teacher_weight, shift_labels", {},
        lambda loss: check_temperature(type(loss).__name__, loss.temperature),
    ),
    "LigerFusedLinearKLDivLoss": (
        functional.fused_linear_kl_div,
        "reduction='batchmean', ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None",
        "student_input, student_weight, target, shift_labels=None", {}, _check_kl_div,
    ),
    "LigerJSD": (
        functional.liger_jsd, "beta=0.5, ignore_index=-100", "log_q, log_p, shift_labels=None",
        {"input": "log_q", "target": "log_p"},
    ),
    "LigerTVDLoss": (
        functional.liger_tvd, "reduction='batchmean', ignore_index=-100", "p, q, shift_labels=None",
        {"input": "p", "target": "q"},
    ),
    "LigerVocabParallelCrossEntropy": (
        functional.vocab_parallel_cross_entropy, _VOCAB_PARALLEL.format("pytorch", "global"),
        "vocab_parallel_logits, target, tp_group=None", {}, _check_vocab_parallel,
    ),
    "LigerMegatronCrossEntropy": (
        functional.vocab_parallel_cross_entropy, _VOCAB_PARALLEL.format("megatron", "partition"),
        "vocab_parallel_logits, target, tp_group=None", {}, _check_vocab_parallel,
    ),
    "LigerReLUSquared": (relu2, "", "x"),
    "LigerSparsemax": (rare.liger_sparsemax, "dim=-1", "x", {"input": "x"}),
}  # fmt: skip
globals().update({name: module(__name__, name, *row) for name, row in _MODULES.items()})


class LigerKLDIVLoss(nn.KLDivLoss):
    """`tigon.kl_div`. A probability of zero adds nothing, so `eps` has no effect."""

    def __init__(self, eps: float = 1e-10, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return functional.liger_kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target)
