"""Cases of `tigon bench`: shapes of real models, the work a perfect kernel must do for them, and inputs as in training.

Shapes: M rows, N features; B batch, S sequence, Hq / Hk query / key heads, D head size; T tokens, I intermediate,
H hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["CASES", "OPS", "Case", "Inputs", "Op", "select"]


@dataclass
class Inputs:
    """What one forward + backward is given."""

    tensors: dict[str, Tensor]  # the op's arguments in order; those that require grad get one
    upstream: tuple[Tensor, ...] = ()  # a gradient for each output; () for a scalar loss

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the tensors whose gradient is taken."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.requires_grad)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Inputs":
        """The same inputs with `change(name, tensor)` in place of each; upstream gradients are named "upstream"."""
        tensors = {
            name: change(name, tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in self.tensors.items()
        }
        return Inputs(tensors, tuple(change("upstream", gradient) for gradient in self.upstream))


@dataclass(frozen=True)
class Case:
    """One row of the table: an op at the shape of a model.

    `options` are the op's keyword arguments; `ignored` is the share of targets that are -100; `frozen` names inputs
    that get no gradient.
    """

    op: str
    model: str
    shape: tuple[int, ...]
    tags: tuple[str, ...] = ("first-light",)
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    ignored: float = 0.0
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """`op/model/shape`, followed by what is unusual; unique."""
        extras = [f"{key}={value}" for key, value in self.options.items()]
        extras += [f"ignored={self.ignored:g}"] if self.ignored else []
        extras += [f"frozen={name}" for name in self.frozen]
        return "/".join([self.op, self.model, "x".join(map(str, self.shape)), *extras])

    @property
    def family(self) -> str:
        return OPS[self.op].family

    @property
    def bytes(self) -> int | None:
        """Fewest bytes of device memory to move, forward + backward; None where products are the bound."""
        count = OPS[self.op].elements
        return None if count is None else count(*self.shape) * self.dtype.itemsize

    @property
    def flops(self) -> int | None:
        """Fewest floating-point operations in matrix products, forward + backward; None where memory is the bound."""
        count = OPS[self.op].flops
        return None if count is None else count(self)

    def make(self, device: torch.device, seed: int = 0) -> Inputs:
        """Fresh inputs from a private generator: the global random state is neither read nor advanced."""
        generator = torch.Generator(device).manual_seed(seed)
        inputs = OPS[self.op].inputs(self, device, generator)
        for name in self.frozen:
            inputs.tensors[name].requires_grad_(False)
        return inputs

    def smaller(self) -> "Case":
        """The case with half the rows, tokens or sequence: for checks that do not fit."""
        axis = OPS[self.op].rows_axis
        shape = tuple(max(1, size // 2) if i == axis else size for i, size in enumerate(self.shape))
        return replace(self, shape=shape)


# --- inputs --------------------------------------------------------------------------------------


def _normal(*shape: int, case: Case, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=case.dtype, device=device, generator=generator)


def _norm_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    m, n = case.shape
    make = lambda *shape: _normal(*shape, case=case, device=device, generator=generator)
    x, upstream = make(m, n), make(m, n)
    weight = make(n).mul_(0.1).add_(1 - float(case.options.get("offset", 0.0)))  # scales near one, as trained ones are
    return Inputs({"x": x.requires_grad_(), "weight": weight.requires_grad_()}, (upstream,))


def _glu_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    gate, up, upstream = (_normal(*case.shape, case=case, device=device, generator=generator) for _ in range(3))
    return Inputs({"gate": gate.requires_grad_(), "up": up.requires_grad_()}, (upstream,))


def _rope_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    b, s, query_heads, key_heads, d = case.shape
    # Projections store (B, S, heads, D) and attention sees (B, heads, S, D); gradients come back in that layout too.
    make = lambda heads: _normal(b, s, heads, d, case=case, device=device, generator=generator).transpose(1, 2)
    q, k, dq, dk = make(query_heads), make(key_heads), make(query_heads), make(key_heads)
    frequency = 500_000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
    angle = torch.arange(s, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)[None]  # [1, S, D]
    cos, sin = angle.cos().to(case.dtype), angle.sin().to(case.dtype)
    return Inputs({"q": q.requires_grad_(), "k": k.requires_grad_(), "cos": cos, "sin": sin}, (dq, dk))


# Logits of a trained model: N(0, SPREAD^2) over the vocabulary, the right token far above, by an amount that varies.
# Its mean puts the right token level with the log-sum-exp of the others, so losses run from about 0 to several nats.
SPREAD = 2.0


def _targets(case: Case, t: int, v: int, device: torch.device, generator: torch.Generator) -> Tensor:
    targets = torch.randint(0, v, (t,), device=device, generator=generator)
    targets[: round(case.ignored * t)] = -100
    return targets[torch.randperm(t, device=device, generator=generator)]


def _target_logits(t: int, v: int, device: torch.device, generator: torch.Generator) -> Tensor:
    level = math.log(v) + SPREAD**2 / 2
    return level + 3.0 * torch.randn(t, device=device, generator=generator)


def _cross_entropy_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    t, v = case.shape
    logits = _normal(t, v, case=case, device=device, generator=generator).mul_(SPREAD)
    targets = _targets(case, t, v, device, generator)
    peak = _target_logits(t, v, device, generator).to(case.dtype)
    logits.scatter_(1, targets.clamp(min=0)[:, None], peak[:, None])
    return Inputs({"input": logits.requires_grad_(), "target": targets})


def _linear_cross_entropy_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    t, h, v = case.shape
    weight = _normal(v, h, case=case, device=device, generator=generator).mul_(SPREAD / math.sqrt(h))
    targets = _targets(case, t, v, device, generator)
    # Adding a * W[target] to a hidden state raises the target's logit by a * |W[target]|^2 = a * SPREAD^2.
    lift = _target_logits(t, v, device, generator) / SPREAD**2
    hidden = _normal(t, h, case=case, device=device, generator=generator)
    hidden.add_(weight[targets.clamp(min=0)] * lift.to(case.dtype)[:, None])
    return Inputs({"input": hidden.requires_grad_(), "linear_weight": weight.requires_grad_(), "target": targets})


# --- ops -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """What the cases of one op share. `elements` counts what memory must move once, `flops` what products must do."""

    family: str  # ops of a family share a picture
    legend: str  # what the numbers of a shape are
    inputs: Callable[[Case, torch.device, torch.Generator], Inputs]
    elements: Callable[..., int] | None = None
    flops: Callable[[Case], int] | None = None
    rows_axis: int = 0


def _linear_cross_entropy_flops(case: Case) -> int:
    t, h, v = case.shape
    gradients = {"input", "linear_weight"} - set(case.frozen)
    return 2 * (1 + len(gradients)) * round(t * (1 - case.ignored)) * h * v  # ignored rows need none


# Forward reads its inputs and writes its outputs; backward reads inputs and upstream gradients and writes gradients.
OPS: dict[str, Op] = {
    "rms_norm": Op("rms_norm", "M x N", _norm_inputs, lambda m, n: 5 * m * n + 3 * n),
    "rope": Op(
        "rope", "B x S x Hq x Hk x D", _rope_inputs,
        lambda b, s, hq, hk, d: 4 * b * s * (hq + hk) * d + 4 * s * d,  # backward needs cos and sin, not q and k
        rows_axis=1,
    ),
    "swiglu": Op("glu", "T x I", _glu_inputs, lambda t, i: 8 * t * i),
    "geglu": Op("glu", "T x I", _glu_inputs, lambda t, i: 8 * t * i),
    # Logits read once, gradient written once: a row is kept on the chip. What reads them twice stands at 67 %.
    "cross_entropy": Op("cross_entropy", "T x V", _cross_entropy_inputs, lambda t, v: 2 * t * v),
    "cross_entropy_inplace": Op("cross_entropy", "T x V", _cross_entropy_inputs, lambda t, v: 2 * t * v),
    "linear_cross_entropy": Op(
        "linear_cross_entropy", "T x H x V", _linear_cross_entropy_inputs, flops=_linear_cross_entropy_flops
    ),
}  # fmt: skip

_MORE, _SMALL = ("more",), ("small",)
_TANH = {"approximate": "tanh"}
_GEMMA_NORM = {"offset": 1.0, "rounding": "after_weight"}

CASES: tuple[Case, ...] = (
    Case("rms_norm", "llama-3-8b", (16384, 4096)),
    Case("rms_norm", "llama-3-70b", (8192, 8192)),
    Case("rms_norm", "llama-3.1-405b", (4096, 16384)),
    Case("rms_norm", "llama-3.2-1b", (16384, 2048)),
    Case("rms_norm", "qwen3-4b", (16384, 2560), _MORE),
    Case("rms_norm", "gemma-2-2b", (16384, 2304), _MORE, _GEMMA_NORM),
    Case("rms_norm", "llama-3-8b", (64, 4096), ("more", "host")),  # so little work that the host shows
    Case("rope", "llama-3-8b", (4, 4096, 32, 8, 128)),
    Case("rope", "gemma-2-2b", (4, 4096, 8, 4, 256), _MORE),
    Case("swiglu", "llama-3-8b", (16384, 14336)),
    Case("swiglu", "qwen3-4b", (16384, 9728), _MORE),
    Case("geglu", "gemma-2-9b", (16384, 14336), options=_TANH),
    Case("geglu", "gemma-2-2b", (16384, 9216), _MORE, _TANH),
    Case("cross_entropy_inplace", "llama-3-8b", (8192, 128256)),
    Case("cross_entropy_inplace", "llama-2-7b", (8192, 32000)),
    Case("cross_entropy", "llama-3-8b", (8192, 128256)),
    Case("cross_entropy", "llama-2-7b", (8192, 32000)),
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256)),
    Case("linear_cross_entropy", "llama-3-8b", (32768, 4096, 128256)),
    Case("linear_cross_entropy", "gemma-2-2b", (8192, 2304, 256000)),
    Case("linear_cross_entropy", "gemma-2-2b", (8192, 2304, 256000), _MORE, {"softcap": 30.0}),
    Case("linear_cross_entropy", "qwen3-1.7b", (16384, 2048, 151936)),
    Case("linear_cross_entropy", "llama-3-8b", (16384, 4096, 128256), _MORE, ignored=0.75),  # as in instruction tuning
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256), _MORE, frozen=("linear_weight",)),
    Case("rms_norm", "small", (512, 1024), _SMALL),
    Case("rope", "small", (1, 256, 8, 2, 64), _SMALL),
    Case("swiglu", "small", (512, 2048), _SMALL),
    Case("geglu", "small", (512, 2048), _SMALL, _TANH),
    Case("cross_entropy_inplace", "small", (512, 16384), _SMALL),
    Case("cross_entropy", "small", (512, 16384), _SMALL),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL),
)


def select(ops: str | None, cases: str) -> list[Case]:
    """The cases of `ops` (None: all) that match `cases` (tags or parts of a name); both separated by commas.

    A word that is a tag selects by tag, "all" selects all; any other word selects the names it is a part of.

    Raises:
        ValueError: an unknown op, or nothing selected.

    Example:
        >>> [case.name for case in select("rope", "small")]
        ['rope/small/1x256x8x2x64']
    """
    wanted_ops = _words(ops) if ops else list(OPS)
    for op in wanted_ops:
        if op not in OPS:
            raise ValueError(f"bench: ops must be among {', '.join(OPS)}, got {op!r}")
    tags = {tag for case in CASES for tag in case.tags}
    words = _words(cases)

    def matches(case: Case) -> bool:
        return any(word == "all" or (word in case.tags if word in tags else word in case.name) for word in words)

    chosen = [case for case in CASES if case.op in wanted_ops and matches(case)]
    if not chosen:
        raise ValueError(
            f"bench: cases must match a tag ({', '.join(sorted(tags))}) or a part of a name (--list shows them), "
            f"got {cases!r} within ops {', '.join(wanted_ops)}"
        )
    return chosen


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
