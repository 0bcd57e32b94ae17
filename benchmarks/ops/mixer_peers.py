"""Calls of the peers of recurrent layers: flash-linear-attention, causal-conv1d and torch."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.eager import Run
from benchmarks.ops.peers import Loader, as_tuple, import_path, refuse_other_options
from benchmarks.workloads import Case
from benchmarks.workloads.mixers import build_mixer, call_mixer

# --- recurrences ---------------------------------------------------------------------------------


def fla_delta_rule(case: Case) -> Run:
    path = "fla.ops.kda:chunk_kda" if case.op == "kda" else "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
    function = import_path(path)
    refuse_other_options(case, "use_qk_l2norm")
    options = {"use_qk_l2norm_in_kernel": case.options.get("use_qk_l2norm", False)}

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor | None = None) -> tuple[Tensor]:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return (function(q, k, v, g, beta, cu_seqlens=None if bounds is None else bounds.long(), **options)[0],)

    return run


def stock_mixer(case: Case) -> Run:
    """Load the mixer of transformers, which calls fla and causal-conv1d if they are installed."""
    mixer = build_mixer(id, *case.shape[2:])
    return lambda *tensors: (call_mixer(mixer, *tensors),)


def fla_mixer(case: Case) -> Run:
    import_path("fla.ops.gated_delta_rule:chunk_gated_delta_rule")
    return stock_mixer(case)


# --- convolutions --------------------------------------------------------------------------------


def _convolution(convolve: Callable[..., Tensor], reads_channels_last: bool = False) -> Loader:
    """Return the loader of `convolve(x, weight, bias)`, a convolution with SiLU of x [B, C, T] or [B, T, C]."""

    def load(case: Case) -> Run:
        refuse_other_options(case, "bias", "channels_last")
        is_other_layout = case.options.get("channels_last", True) != reads_channels_last
        view = (lambda x: x.mT) if is_other_layout else (lambda x: x)
        return lambda x, weight, bias=None: (view(convolve(view(x), weight, bias)),)

    return load


def _stock_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    channels, taps = weight.shape
    return F.silu(F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=channels)[..., : x.shape[-1]])


def _imported_convolution(path: str, reads_channels_last: bool = False, **settings: str) -> Loader:
    def load(case: Case) -> Run:
        function = import_path(path)
        convolve = lambda x, weight, bias: as_tuple(function(x, weight, bias, **settings))[0]
        return _convolution(convolve, reads_channels_last)(case)

    return load


CONVOLUTIONS: dict[str, Loader] = {
    "torch": _convolution(_stock_convolution),
    "causal-conv1d": _imported_convolution("causal_conv1d:causal_conv1d_fn", activation="silu"),
    "fla": _imported_convolution("fla.modules.convolution:causal_conv1d", True, activation="silu"),
}
