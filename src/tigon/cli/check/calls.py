"""The calls with which `tigon check` tries each op, at odd sizes and at the sizes of models.

Sizes: M rows, N columns; B batch, S sequence, Hq query heads, Hk key heads, D head size; T tokens, H hidden, I inner, O
outputs, E experts, K experts of a token, r rank, V vocabulary; C channels, W taps.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tigon

Tensors = dict[str, Tensor]


class Draw:
    """Draws tensors in a dtype on the CPU, so that they are the same on every device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def targets(self, count: int, classes: int) -> Tensor:
        """Draw classes; two of seven are ignored."""
        targets = torch.randint(0, classes, (count,), generator=self.generator)
        return targets.masked_fill(torch.arange(count) % 7 < 2, -100)


def _norm(draw: Draw, m: int, n: int) -> Tensors:
    return {"x": draw(m, n), "weight": draw(n)}


def _rope(draw: Draw, b: int, s: int, hq: int, hk: int, d: int) -> Tensors:
    angles = draw(1, s, d // 2, dtype=torch.float32).repeat(1, 1, 2)
    q, k = (draw(b, s, heads, d).transpose(1, 2) for heads in (hq, hk))
    return {"q": q, "k": k, "cos": angles.cos().to(draw.dtype), "sin": angles.sin().to(draw.dtype)}


def _qk_norm_rope(draw: Draw, b: int, s: int, hq: int, hk: int, d: int) -> Tensors:
    return _rope(draw, b, s, hq, hk, d) | {"q_weight": draw(d), "k_weight": draw(d)}


def _gated_delta_rule(draw: Draw, b: int, t: int, hk: int, hv: int, d: int) -> Tensors:
    q, k, v = draw(b, t, hk, d), draw(b, t, hk, d), draw(b, t, hv, d)
    return {"q": q, "k": k, "v": v, "g": -draw(b, t, hv).abs(), "beta": draw(b, t, hv).sigmoid()}


def _ssd(draw: Draw, b: int, t: int, h: int, p: int, k: int, n: int) -> Tensors:
    x, dt, rates = draw(b, t, h, p), draw(b, t, h), -draw(h, dtype=torch.float32).abs()
    keys, queries = (draw(b, t, k, n, scale=n**-0.25) for _ in range(2))
    return {"x": x, "dt": dt, "A": rates, "B": keys, "C": queries}


def _lora_linear(draw: Draw, t: int, i: int, o: int, r: int) -> Tensors:
    a, b = draw(r, i, scale=i**-0.5, dtype=torch.float32), draw(o, r, scale=r**-0.5, dtype=torch.float32)
    return {"x": draw(t, i), "weight": draw(o, i, scale=i**-0.5), "a": a, "b": b}


def _moe_mlp(draw: Draw, t: int, h: int, e: int, i: int, k: int) -> Tensors:
    weights, index = draw(t, e, dtype=torch.float32).softmax(-1).topk(k)
    up, down = draw(e, 2 * i, h, scale=h**-0.5), draw(e, h, i, scale=i**-0.5)
    return {"x": draw(t, h), "up_proj": up, "down_proj": down, "top_k_index": index, "top_k_weights": weights}


def _lora_moe_mlp(draw: Draw, t: int, h: int, e: int, i: int, k: int, r: int) -> Tensors:
    tensors = _moe_mlp(draw, t, h, e, i, k)
    for name, inputs, outputs in (("up", h, 2 * i), ("down", i, h)):
        tensors[f"{name}_a"] = draw(e, r, inputs, scale=inputs**-0.5, dtype=torch.float32)
        b = draw(outputs, r, e, scale=0.25 * r**-0.5, dtype=torch.float32)
        tensors[f"{name}_b"] = b.permute(2, 0, 1)
    return tensors


def _linear_cross_entropy(draw: Draw, t: int, h: int, v: int) -> Tensors:
    return {"input": draw(t, h), "linear_weight": draw(v, h, scale=2 * h**-0.5), "target": draw.targets(t, v)}


def _linear_log_probs(draw: Draw, t: int, h: int, v: int) -> Tensors:
    names = ("hidden", "weight", "targets")
    return dict(zip(names, _linear_cross_entropy(draw, t, h, v).values(), strict=True))


def _linear_distillation(draw: Draw, t: int, h: int, v: int) -> Tensors:
    student = _linear_log_probs(draw, t, h, v)
    near = lambda x, distance: x + draw(*x.shape, scale=distance)
    teacher = {"hidden": near(student["hidden"], 0.35), "weight": near(student["weight"], 0.7 * h**-0.5)}
    return student | {f"teacher_{name}": x for name, x in teacher.items()}


@dataclass(frozen=True)
class OpCall:
    """An op, the function that makes its tensors by name from sizes, its sizes, and options to try. The tensors in
    `constants` get no gradient. A `small` call has odd sizes, and a `large` one is timed; `rows_axis` is the size that
    an accuracy check of the large call reduces. A loss, and a gradient that is a difference of terms of `term_size`,
    have a tolerance in units in the last place of larger numbers than their own."""

    op: str
    make: Callable[..., Tensors]
    small: tuple[int, ...]
    large: tuple[int, ...]
    options: tuple[dict[str, Any], ...] = ({},)
    constants: tuple[str, ...] = ()
    rows_axis: int = 0
    is_loss: bool = False
    term_size: float = 0.0

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(tigon, self.op)

    @property
    def reference(self) -> Callable[..., Any]:
        """Return the definition of the op in torch, from the module of the op."""
        return getattr(importlib.import_module(tigon._MODULES[self.op]), f"{self.op}_reference")

    @property
    def medium(self) -> tuple[int, ...]:
        """Return the large sizes with few rows."""
        return tuple(min(size, 256) if i == self.rows_axis else size for i, size in enumerate(self.large))

    def tensors(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensors:
        """Return the tensors on a device; the floating-point ones that are no constants require gradients."""
        tensors = {name: x.to(device) for name, x in self.make(Draw(dtype), *sizes).items()}
        return {n: x.requires_grad_(x.is_floating_point() and n not in self.constants) for n, x in tensors.items()}


_AFTER = {"offset": 1.0, "rounding": "after_weight"}
_ROTARY: dict[str, Any] = {
    "small": (2, 3, 6, 2, 16), "large": (2, 2048, 32, 8, 128), "constants": ("cos", "sin"), "rows_axis": 1,
}  # fmt: skip
# The sizes of small and large calls, and what calls of one kind have in common.
_NORM, _MLP = ((7, 48), (8192, 4096)), ((7, 66), (4096, 14336))
_LOSS: dict[str, Any] = {"small": (7, 24, 100), "large": (4096, 2048, 32000), "is_loss": True}
_DIVERGENCE: dict[str, Any] = {
    "small": (7, 100), "large": (2048, 32000), "options": ({"from_logits": True},), "constants": ("target",),
    "is_loss": True,
}  # fmt: skip


def _same_size(*names: str) -> Callable[..., Tensors]:
    """Return the function that makes tensors [M, N] with these names."""
    return lambda draw, m, n: {name: draw(m, n) for name in names}


CALLS = (
    OpCall("rms_norm", _norm, *_NORM, ({}, _AFTER)),
    OpCall("add_rms_norm", lambda d, m, n: {"x": d(m, n), "residual": d(m, n), "weight": d(n)}, *_NORM),
    OpCall(
        "gated_rms_norm", lambda d, m, n: {"x": d(m, n), "gate": d(m, n), "weight": d(n)}, *_NORM,
        ({}, {"gate_first": True, "group_size": 16}),
    ),
    OpCall("layer_norm", lambda d, m, n: _norm(d, m, n) | {"bias": d(n)}, *_NORM),
    OpCall("rope", _rope, options=({}, {"layout": "interleaved"}), **_ROTARY),
    OpCall("qk_norm_rope", _qk_norm_rope, options=({}, _AFTER), **_ROTARY),
    OpCall(
        "causal_conv1d",
        lambda d, b, t, c, w: {"x": d(b, t, c), "weight": d(c, w, scale=w**-0.5), "bias": d(c, scale=0.1)},
        (2, 7, 33, 4), (1, 4096, 8192, 4), ({}, {"activation": None}), rows_axis=1,
    ),
    OpCall(
        "gated_delta_rule", _gated_delta_rule, (1, 70, 2, 4, 16), (1, 4096, 4, 8, 128),
        ({"use_qk_l2norm": True}, {"use_qk_l2norm": True, "scale": 0.5}), rows_axis=1,
    ),
    OpCall(
        "kda", lambda d, b, t, hk, hv, n: _gated_delta_rule(d, b, t, hk, hv, n) | {"g": -d(b, t, hv, n).abs()},
        (1, 70, 2, 2, 16), (1, 4096, 8, 8, 128), ({"use_qk_l2norm": True},), rows_axis=1,
    ),
    OpCall("ssd", _ssd, (1, 70, 4, 16, 2, 16), (1, 4096, 16, 64, 2, 128), ({"dt_softplus": True},), rows_axis=1),
    OpCall("swiglu", _same_size("gate", "up"), *_MLP),
    OpCall("geglu", _same_size("gate", "up"), *_MLP, ({}, {"approximate": "tanh"})),
    OpCall("gelu", _same_size("x"), *_MLP, ({}, {"approximate": "tanh"}, {"approximate": "sigmoid"})),
    OpCall("relu2", _same_size("x"), *_MLP),
    OpCall("lora_linear", _lora_linear, (7, 8, 24, 4), (4096, 4096, 4096, 16), constants=("weight",)),
    OpCall("moe_mlp", _moe_mlp, (5, 16, 16, 24, 3), (4096, 2048, 16, 768, 4)),
    OpCall(
        "lora_moe_mlp", _lora_moe_mlp, (5, 16, 16, 24, 3, 4), (4096, 2048, 16, 768, 4, 16),
        constants=("up_proj", "down_proj"),
    ),
    OpCall(
        "load_balancing_loss", lambda d, layers, t, e: {"router_logits": d(layers, t, e, scale=2.0)}, (2, 11, 16),
        (24, 8192, 16), ({"num_experts": 16, "top_k": 3},), rows_axis=1, is_loss=True, term_size=1.0,
    ),
    OpCall("softmax", _same_size("x"), *_NORM),
    OpCall(
        "cross_entropy", lambda d, t, v: {"input": d(t, v, scale=2.0), "target": d.targets(t, v)}, (7, 100),
        (4096, 32000), ({}, {"z_loss": 0.01, "label_smoothing": 0.1, "reduction": "none", "softcap": 5.0}),
        is_loss=True,
    ),
    OpCall("linear_cross_entropy", _linear_cross_entropy, options=({}, {"reduction": "none"}), **_LOSS),
    OpCall(
        "linear_log_probs", _linear_log_probs,
        options=({}, {"return_entropy": True, "temperature": 0.7, "softcap": 5.0}), **_LOSS,
    ),
    OpCall(
        "linear_distillation", _linear_distillation, constants=("teacher_hidden", "teacher_weight"), term_size=1.0,
        options=({"beta": 0.3}, {"divergence": "kl", "temperature": 0.7}), **_LOSS,
    ),
    OpCall("kl_div", _same_size("input", "target"), **_DIVERGENCE),
    OpCall("jsd", _same_size("input", "target"), term_size=1.0, **_DIVERGENCE),
    OpCall("tvd", _same_size("input", "target"), **_DIVERGENCE),
)  # fmt: skip
