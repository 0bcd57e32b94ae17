"""Eager code: the operations that Hugging Face models run, one by one. In fp64 it is exact for many ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.ops.cases import Case

Run = Callable[..., tuple[Tensor, ...]]


def _widen(x: Tensor) -> Tensor:
    # Only exact results are computed in fp64.
    return x if x.dtype == torch.float64 else x.float()


# --- norms and rows ------------------------------------------------------------------------------


def _normalise(case: Case, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the RMS norm of x, rounded to `dtype`, by default that of x."""
    offset, dtype = case.options.get("offset", 0.0), dtype or x.dtype
    x_hat = _widen(x)
    x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + 1e-6)
    if case.options.get("rounding") == "after_weight":
        return (x_hat * (offset + weight.to(x_hat.dtype))).to(dtype)
    return (offset + weight if offset else weight) * x_hat.to(dtype)


def _rms_norm(case: Case) -> Run:
    return lambda x, weight: (_normalise(case, x, weight),)


def _add_rms_norm(case: Case) -> Run:
    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return _normalise(case, total, weight), total

    return run


def _gated_rms_norm(case: Case) -> Run:
    """Return what the gated norms of Mamba 2 (gate first), Zamba 2 (groups) and Qwen3-Next compute in transformers."""
    size = case.options.get("group_size")
    activate = torch.sigmoid if case.options.get("activation") == "sigmoid" else F.silu

    def normalise(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if size is None:
            return _normalise(case, x, weight, dtype)
        return _normalise(case, x.unflatten(-1, (-1, size)), weight.view(-1, size), dtype).flatten(-2)

    def run(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if case.options.get("gate_first"):
            return (normalise(_widen(x) * activate(_widen(gate)), weight, x.dtype),)
        rounds = case.options.get("rounding") != "after_weight"
        y = normalise(x, weight, x.dtype if rounds else _widen(x).dtype)
        return ((y * activate(_widen(gate))).to(x.dtype),)

    return run


def _layer_norm(case: Case) -> Run:
    return lambda x, weight, bias: (F.layer_norm(x, weight.shape, weight, bias, 1e-5),)


def _softmax(case: Case) -> Run:
    return lambda x: (torch.softmax(_widen(x), -1).to(x.dtype),)


# --- rope ----------------------------------------------------------------------------------------


def _rotate_half(x: Tensor) -> Tensor:
    """Return the negated second half followed by the first half."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _deinterleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours, and return the first of each pair followed by the second of each (DeepSeek)."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _sectioned(table: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Take the sections of each half from the three axes in turn: [3, B, S, D] -> [B, S, D] (Qwen2-VL)."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections * 2, -1))], -1)


def _rope(case: Case) -> Run:
    layout, sections = case.options.get("layout", "split_half"), case.options.get("sections")

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if sections:
            cos, sin = _sectioned(cos, sections), _sectioned(sin, sections)
        cos, sin = cos[:, None], sin[:, None]
        if layout == "deinterleaved":
            cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
            return _deinterleaved(q, cos, sin), _deinterleaved(k, cos, sin)
        rotate = _rotate_half
        if layout == "interleaved":
            cos, sin = (table.chunk(2, -1)[0].repeat_interleave(2, -1) for table in (cos, sin))
            rotate = _rotate_pairs
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    return run


def _qk_norm_rope(case: Case) -> Run:
    rope = _rope(case)

    def run(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return rope(_normalise(case, q, q_weight), _normalise(case, k, k_weight), cos, sin)

    return run


# --- experts -------------------------------------------------------------------------------------


def _moe_mlp(case: Case) -> Run:
    """Compute one expert after the other, and sum over experts at the end, as grouped products do.

    `torch.where` waits for the device once for each expert.
    """

    def run(x: Tensor, up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows = x.new_zeros(*index.shape, x.shape[1])
        for expert in range(up_proj.shape[0]):
            token, k = torch.where(index == expert)
            gate, up = F.linear(x[token], up_proj[expert]).chunk(2, -1)
            rows[token, k] = F.linear(F.silu(gate) * up, down_proj[expert]) * weights[token, k, None]
        return (rows.sum(1),)

    return run


def _load_balancing_loss(case: Case) -> Run:
    """Compute `load_balancing_loss_func` of transformers 5.17, without a mask."""

    def run(router_logits: Tensor) -> tuple[Tensor, ...]:
        experts, top_k = case.options["num_experts"], case.options["top_k"]
        counts = torch.zeros(experts, dtype=_widen(router_logits).dtype, device=router_logits.device)
        sums, rows = torch.zeros_like(counts), 0.0
        for layer in router_logits.unbind():
            probabilities = F.softmax(layer, dim=-1)
            _, chosen = torch.topk(probabilities, top_k, dim=-1)
            counts = counts + torch.bincount(chosen.reshape(-1), minlength=experts).to(counts.dtype)
            sums = sums + _widen(probabilities).sum(dim=0)
            rows = rows + probabilities.shape[0]
        return (torch.sum(counts / rows * (sums / rows)[None]) * experts,)

    return run


# --- losses --------------------------------------------------------------------------------------


def _cross_entropy(case: Case) -> Run:
    return lambda input, target: (F.cross_entropy(_widen(input), target),)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def head_logits(input: Tensor, linear_weight: Tensor, softcap: float | None) -> Tensor:
    """Compute the logits as the head of a model does: [T, H], [V, H] -> [T, V] in the dtype of the inputs."""
    return softcapped(F.linear(input, linear_weight), softcap)


@torch.no_grad()
def token_results(options: Mapping[str, object], logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Return the requested results of each token: log-probability of the target, entropy; [T] each, 0 where ignored."""
    requests = [name for name in ("return_log_probs", "return_entropy") if options.get(name)]
    if not requests:
        return ()
    log_p = torch.log_softmax(logits, -1)
    makers = {
        "return_log_probs": lambda: log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0],
        "return_entropy": lambda: -(log_p.exp() * log_p).sum(-1),
    }
    return tuple(makers[name]().masked_fill(target < 0, 0.0) for name in requests)


def _linear_cross_entropy(case: Case) -> Run:
    # The option `acc_dtype` changes nothing here, because one product sums in fp32.
    softcap = case.options.get("softcap")

    def run(input: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = _widen(head_logits(input, linear_weight, softcap))
        return F.cross_entropy(logits, target), *token_results(case.options, logits, target)

    return run


def _linear_log_probs(case: Case) -> Run:
    """Compute all logits, as trainers did before they had a fused head. The options are those that cases have."""
    softcap, temperature = case.options.get("softcap"), float(case.options.get("temperature", 1.0))

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = _widen(head_logits(hidden, weight, softcap)) / temperature
        log_p = torch.log_softmax(logits, -1)
        valid = targets >= 0
        log_probs = log_p.gather(-1, targets.clamp(min=0)[:, None])[:, 0].where(valid, 0.0)
        if not case.options.get("return_entropy"):
            return (log_probs,)
        return log_probs, -(log_p.exp() * log_p).sum(-1).where(valid, 0.0)

    return run


def _summed_kl_div(case: Case, input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(input, target, reduction="sum", log_target=bool(case.options.get("log_target")))


def _summed_jsd(case: Case, input: Tensor, target: Tensor) -> Tensor:
    """Return beta KL(target || mixture) + (1 - beta) KL(input || mixture), mixture = beta target + (1 - beta) input."""
    beta = float(case.options.get("beta", 0.5))
    if case.options.get("from_logits"):
        temperature = float(case.options.get("temperature", 1.0))
        input, target = (torch.log_softmax(x / temperature, -1) for x in (input, target))
    mixture = torch.logsumexp(torch.stack((target + math.log(beta), input + math.log(1 - beta))), 0)
    divergence = lambda log_p: F.kl_div(mixture, log_p, reduction="none", log_target=True)
    return (beta * divergence(target) + (1 - beta) * divergence(input)).sum()


def _summed_tvd(case: Case, input: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (input - target).abs().sum()


def _summed_cross_entropy(case: Case, input: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(input, target, reduction="sum")


# These losses take [T, V] logits or distributions in fp32 or fp64, and sum over the rows.
SUMMED: dict[str, Callable[[Case, Tensor, Tensor], Tensor]] = {
    "cross_entropy": _summed_cross_entropy,
    "cross_entropy_inplace": _summed_cross_entropy,
    "kl_div": _summed_kl_div,
    "jsd": _summed_jsd,
    "tvd": _summed_tvd,
}


def _batch_mean(op: str) -> Callable[[Case], Run]:
    return lambda case: lambda input, target: (SUMMED[op](case, _widen(input), _widen(target)) / input.shape[0],)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """Return what GELUActivation, NewGELUActivation and QuickGELUActivation of transformers compute."""
    if approximate == "none":
        return F.gelu(x)
    if approximate == "sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


EAGER: dict[str, Callable[[Case], Run]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "gated_rms_norm": _gated_rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "qk_norm_rope": _qk_norm_rope,
    "swiglu": lambda case: lambda gate, up: (F.silu(gate) * up,),
    "geglu": lambda case: lambda gate, up: (F.gelu(gate, **case.options) * up,),
    "gelu": lambda case: lambda x: (_gelu(x, case.options.get("approximate", "none")),),
    "relu2": lambda case: lambda x: (F.relu(x).square(),),
    "moe_mlp": _moe_mlp,
    "load_balancing_loss": _load_balancing_loss,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "cross_entropy_inplace": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_log_probs": _linear_log_probs,
    "kl_div": _batch_mean("kl_div"),
    "jsd": _batch_mean("jsd"),
    "tvd": _batch_mean("tvd"),
}
