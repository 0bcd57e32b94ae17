"""Inputs as in training, made from a private generator: the global random state is neither read nor advanced.

Shapes: M rows, N features; B batch, S sequence, Hq / Hk query / key heads, D head size; T tokens, I intermediate,
H hidden, V vocabulary; E experts, K of them for a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Inputs", "Maker", "Problem"]


class Problem(Protocol):
    """What inputs depend on: a `cases.Case` is one."""

    shape: tuple[int, ...]
    options: Mapping[str, object]
    ignored: float  # share of the targets
    dtype: torch.dtype


@dataclass
class Inputs:
    """What one forward + backward is given."""

    tensors: dict[str, Tensor]  # the op's arguments in order; those that require grad get one
    upstream: tuple[Tensor, ...] = ()  # a gradient for each output; () for a scalar loss, alone or first among outputs

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the tensors whose gradient is taken."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that are taken."""
        return sum(self.tensors[name].nbytes for name in self.wanted)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """The same inputs with `change(name, tensor)` in place of each; upstream gradients are named "upstream"."""
        tensors = {
            name: change(name, tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in self.tensors.items()
        }
        return Inputs(tensors, tuple(change("upstream", gradient) for gradient in self.upstream))

    def fingerprints(self) -> dict[str, int]:
        """Of each tensor the sum of its memory as 16-bit integers: whether it was overwritten, at no memory."""
        bits = lambda x: torch.empty(0, dtype=torch.int16, device=x.device).set_(x.untyped_storage())
        total = lambda x: int(bits(x).sum(dtype=torch.int64))
        return {name: total(x) for name, x in self.tensors.items()} | {
            f"upstream {i}": total(x) for i, x in enumerate(self.upstream)
        }


@dataclass(frozen=True)
class Maker:
    """Draws the tensors of a case on a device."""

    case: Problem
    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        options = {"dtype": dtype or self.case.dtype, "device": self.device, "generator": self.generator}
        return torch.randn(*shape, **options)

    def scale(self, n: int) -> Tensor:
        """Weights of a norm: near one, as trained ones are."""
        return self.normal(n).mul_(0.1).add_(1 - float(self.case.options.get("offset", 0.0)))

    def targets(self, t: int, v: int) -> Tensor:
        targets = torch.randint(0, v, (t,), device=self.device, generator=self.generator)
        targets[: round(self.case.ignored * t)] = -100
        return targets[torch.randperm(t, device=self.device, generator=self.generator)]

    def target_logits(self, t: int, v: int) -> Tensor:
        """Of the right tokens, [T] fp32."""
        return math.log(v) + SPREAD**2 / 2 + 3.0 * self.normal(t, dtype=torch.float32)

    def logits(self, t: int, v: int, targets: Tensor) -> Tensor:
        logits = self.normal(t, v).mul_(SPREAD)
        peak = self.target_logits(t, v).to(logits.dtype)
        return logits.scatter_(1, targets.clamp(min=0)[:, None], peak[:, None])

    def angles(self, b: int, s: int, d: int) -> Tensor:
        """[1, S, D] fp32, its halves equal, as Hugging Face's tables are; [3, B, S, D] for positions of three axes."""
        frequency = 500_000.0 ** (-torch.arange(0, d, 2, device=self.device, dtype=torch.float32) / d)
        positions = torch.arange(s, device=self.device, dtype=torch.float32)[None]
        if "sections" in self.case.options:  # time, height and width of an image 32 patches wide
            positions = torch.stack((positions // 1024, positions % 1024 // 32, positions % 32)).expand(3, b, s)
        angle = positions[..., None] * frequency
        return torch.cat((angle, angle), -1)


# Logits of a trained model: N(0, SPREAD^2) over the vocabulary, the right token far above, by an amount that varies.
# Its mean puts the right token level with the log-sum-exp of the others, so losses run from about 0 to several nats.
SPREAD = 2.0
# How far the logits of a student stand from its teacher's: their divergence is a fraction of a nat.
DISTANCE = 0.7


# --- rows ----------------------------------------------------------------------------------------


def rows(make: Maker) -> Inputs:
    x, upstream = make.normal(*make.case.shape), make.normal(*make.case.shape)
    return Inputs({"x": x.requires_grad_()}, (upstream,))


def norm(make: Maker) -> Inputs:
    x, upstream = make.normal(*make.case.shape), make.normal(*make.case.shape)
    weight = make.scale(x.shape[-1])
    return Inputs({"x": x.requires_grad_(), "weight": weight.requires_grad_()}, (upstream,))


def layer_norm(make: Maker) -> Inputs:
    inputs = norm(make)
    inputs.tensors["bias"] = make.normal(make.case.shape[1]).mul_(0.1).requires_grad_()
    return inputs


def add_norm(make: Maker) -> Inputs:
    # The residual stream grows with depth: what a layer adds is a fraction of it.
    residual = make.normal(*make.case.shape).mul_(4).requires_grad_()
    inputs, dsum = norm(make), make.normal(*make.case.shape)
    tensors = {"x": inputs.tensors["x"], "residual": residual, "weight": inputs.tensors["weight"]}
    return Inputs(tensors, (*inputs.upstream, dsum))


def glu(make: Maker) -> Inputs:
    gate, up, upstream = (make.normal(*make.case.shape) for _ in range(3))
    return Inputs({"gate": gate.requires_grad_(), "up": up.requires_grad_()}, (upstream,))


# --- heads ---------------------------------------------------------------------------------------


def rope(make: Maker) -> Inputs:
    b, s, query_heads, key_heads, d = make.case.shape
    # Projections store (B, S, heads, D) and attention sees (B, heads, S, D); gradients come back in that layout too.
    heads = lambda count: make.normal(b, s, count, d).transpose(1, 2)
    q, k, dq, dk = heads(query_heads), heads(key_heads), heads(query_heads), heads(key_heads)
    angle = make.angles(b, s, d)
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    return Inputs({"q": q.requires_grad_(), "k": k.requires_grad_(), "cos": cos, "sin": sin}, (dq, dk))


def qk_norm_rope(make: Maker) -> Inputs:
    inputs, d = rope(make), make.case.shape[-1]
    scales = {name: make.scale(d).requires_grad_() for name in ("q_weight", "k_weight")}
    q, k, cos, sin = inputs.tensors.values()
    return Inputs({"q": q, "k": k, **scales, "cos": cos, "sin": sin}, inputs.upstream)


# --- experts -------------------------------------------------------------------------------------


def moe_mlp(make: Maker) -> Inputs:
    t, h, experts, i, k = make.case.shape
    x, upstream = make.normal(t, h), make.normal(t, h)
    up, down = (make.normal(experts, m, n).mul_(n**-0.5) for m, n in ((2 * i, h), (h, i)))
    weights, index = make.normal(t, experts, dtype=torch.float32).softmax(-1).topk(k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    wanted = {"x": x, "up_proj": up, "down_proj": down, "top_k_index": index, "top_k_weights": weights}
    return Inputs({n: y.requires_grad_() if y.is_floating_point() else y for n, y in wanted.items()}, (upstream,))


# --- losses --------------------------------------------------------------------------------------


def cross_entropy(make: Maker) -> Inputs:
    t, v = make.case.shape
    targets = make.targets(t, v)
    return Inputs({"input": make.logits(t, v, targets).requires_grad_(), "target": targets})


def linear_cross_entropy(make: Maker) -> Inputs:
    t, h, v = make.case.shape
    weight = make.normal(v, h).mul_(SPREAD / math.sqrt(h))
    targets = make.targets(t, v)
    # Adding a * W[target] to a hidden state raises the target's logit by a * |W[target]|^2 = a * SPREAD^2.
    lift = make.target_logits(t, v) / SPREAD**2
    hidden = make.normal(t, h)
    hidden.add_(weight[targets.clamp(min=0)] * lift.to(hidden.dtype)[:, None])
    return Inputs({"input": hidden.requires_grad_(), "linear_weight": weight.requires_grad_(), "target": targets})


def _divergence(kinds: Callable[[Problem], tuple[str, str]]) -> Callable[[Maker], Inputs]:
    """A student's and its teacher's distributions over the vocabulary, each as logits, log_probs or probs."""

    def make_inputs(make: Maker) -> Inputs:
        t, v = make.case.shape
        teacher = make.logits(t, v, make.targets(t, v))
        student = make.normal(t, v).mul_(DISTANCE).add_(teacher)
        forms = {
            "logits": lambda x: x,
            "log_probs": lambda x: torch.log_softmax(x, -1, dtype=torch.float32).to(x.dtype),
            "probs": lambda x: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype),
        }
        input, target = (forms[kind](x) for kind, x in zip(kinds(make.case), (student, teacher), strict=True))
        return Inputs({"input": input.requires_grad_(), "target": target})

    return make_inputs


kl_div = _divergence(lambda case: ("log_probs", "log_probs" if case.options.get("log_target") else "probs"))
jsd = _divergence(lambda case: ("logits",) * 2 if case.options.get("from_logits") else ("log_probs",) * 2)
tvd = _divergence(lambda case: ("probs", "probs"))
