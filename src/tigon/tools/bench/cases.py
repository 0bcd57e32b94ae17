"""Cases of `tigon bench`: shapes of real models, and the work that a perfect kernel must do for them.

Shapes: M rows, N features; B batch, S sequence, Hq / Hk query / key heads, D head size; T tokens, I intermediate,
H hidden, V vocabulary; E experts, K of them for a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from tigon.tools.bench import inputs
from tigon.tools.bench.inputs import Inputs, Maker

__all__ = ["CASES", "OPS", "Case", "Op", "listed", "select", "tagged"]


@dataclass(frozen=True)
class Case:
    """One row of the table: an op at the shape of a model.

    `options` are the op's keyword arguments; `ignored` is the share of targets that are -100; `frozen` names inputs
    that get no gradient. With `no_grad` nothing does: the forward alone is measured.
    """

    op: str
    model: str
    shape: tuple[int, ...]
    tags: tuple[str, ...] = ("first-light",)
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    ignored: float = 0.0
    frozen: tuple[str, ...] = ()
    no_grad: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """`op/model/shape`, followed by what is unusual; unique."""
        return "/".join([self.op, self.model, "x".join(map(str, self.shape)), *self.extras])

    @property
    def extras(self) -> tuple[str, ...]:
        """What is unusual, in words."""
        text = lambda value: "+".join(map(text, value)) if isinstance(value, tuple) else str(value)
        found = [f"{key}={text(value).removeprefix('torch.')}" for key, value in self.options.items()]
        found += [f"ignored={self.ignored:g}"] if self.ignored else []
        found += [f"frozen={name}" for name in self.frozen]
        return (*found, *(["no_grad"] if self.no_grad else []))

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
        """Fresh inputs, the same for the same seed."""
        made = OPS[self.op].inputs(Maker(self, device, torch.Generator(device).manual_seed(seed)))
        for name in made.wanted if self.no_grad else self.frozen:
            made.tensors[name].requires_grad_(False)
        return made

    def smaller(self) -> "Case":
        """The case with half the rows, tokens or sequence: for checks that do not fit."""
        axis = OPS[self.op].rows_axis
        shape = tuple(max(1, size // 2) if i == axis else size for i, size in enumerate(self.shape))
        return replace(self, shape=shape)


# --- ops -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """What the cases of one op share. `elements` counts what memory must move once, `flops` what products must do."""

    family: str  # ops of a family share a picture
    legend: str  # what the numbers of a shape are
    inputs: Callable[[Maker], Inputs]
    elements: Callable[..., int] | None = None
    flops: Callable[[Case], int] | None = None
    rows_axis: int = 0


def _linear_cross_entropy_flops(case: Case) -> int:
    t, h, v = case.shape
    gradients = set() if case.no_grad else {"input", "linear_weight"} - set(case.frozen)
    return 2 * (1 + len(gradients)) * round(t * (1 - case.ignored)) * h * v  # ignored rows need none


def _moe_mlp_flops(case: Case) -> int:
    t, h, _, i, k = case.shape
    return 3 * 2 * t * k * h * (2 * i + i)  # two products forward, four backward


# Forward reads its inputs and writes its outputs; backward reads inputs and upstream gradients and writes gradients.
OPS: dict[str, Op] = {
    "rms_norm": Op("rms_norm", "M x N", inputs.norm, lambda m, n: 5 * m * n + 3 * n),
    # Forward also reads the residual and writes the sum, backward also reads its gradient; x and residual share theirs.
    "add_rms_norm": Op("add_rms_norm", "M x N", inputs.add_norm, lambda m, n: 8 * m * n + 3 * n),
    "layer_norm": Op("layer_norm", "M x N", inputs.layer_norm, lambda m, n: 5 * m * n + 5 * n),
    "rope": Op(
        "rope", "B x S x Hq x Hk x D", inputs.rope,
        lambda b, s, hq, hk, d: 4 * b * s * (hq + hk) * d + 4 * s * d,  # backward needs cos and sin, not q and k
        rows_axis=1,
    ),
    "qk_norm_rope": Op(
        "qk_norm_rope", "B x S x Hq x Hk x D", inputs.qk_norm_rope,
        lambda b, s, hq, hk, d: 5 * b * s * (hq + hk) * d + 4 * s * d + 6 * d,  # the norms' backward needs q and k
        rows_axis=1,
    ),
    "swiglu": Op("glu", "T x I", inputs.glu, lambda t, i: 8 * t * i),
    "geglu": Op("glu", "T x I", inputs.glu, lambda t, i: 8 * t * i),
    "relu2": Op("relu2", "T x I", inputs.rows, lambda t, i: 5 * t * i),
    "moe_mlp": Op("moe_mlp", "T x H x E x I x K", inputs.moe_mlp, flops=_moe_mlp_flops),
    "softmax": Op("softmax", "M x N", inputs.rows, lambda m, n: 5 * m * n),
    # Logits read once, gradient written once: a row is kept on the chip. What reads them twice stands at 67 %.
    "cross_entropy": Op("cross_entropy", "T x V", inputs.cross_entropy, lambda t, v: 2 * t * v),
    "cross_entropy_inplace": Op("cross_entropy", "T x V", inputs.cross_entropy, lambda t, v: 2 * t * v),
    "linear_cross_entropy": Op(
        "linear_cross_entropy", "T x H x V", inputs.linear_cross_entropy, flops=_linear_cross_entropy_flops
    ),
    # Both distributions read once, one gradient written.
    "kl_div": Op("divergence", "T x V", inputs.kl_div, lambda t, v: 3 * t * v),
    "jsd": Op("divergence", "T x V", inputs.jsd, lambda t, v: 3 * t * v),
    "tvd": Op("divergence", "T x V", inputs.tvd, lambda t, v: 3 * t * v),
}  # fmt: skip


# --- cases ---------------------------------------------------------------------------------------

# `first-light` and `roofline` are measured by default; `roofline` are the shapes that docs/performance.md is about,
# `linear` those of docs/linear_cross_entropy.md.
_FIRST, _ROOFLINE = ("first-light", "roofline"), ("roofline",)
_MORE, _SMALL, _SWEEP = ("more",), ("small",), ("sweep",)
_LINEAR, _FIRST_LINEAR, _MORE_LINEAR = ("linear",), ("first-light", "linear"), ("more", "linear")
_TANH = {"approximate": "tanh"}
_GEMMA_NORM = {"offset": 1.0, "rounding": "after_weight"}
_FP32_SUM = {"acc_dtype": torch.float32}
_RETURNED = {"return_log_probs": True, "return_entropy": True}

_MODELS = (
    Case("rms_norm", "llama-3-8b", (16384, 4096), _FIRST),
    Case("rms_norm", "llama-3-70b", (8192, 8192), _FIRST),
    Case("rms_norm", "llama-3.1-405b", (4096, 16384), _FIRST),
    Case("rms_norm", "llama-3.2-1b", (16384, 2048), _FIRST),
    Case("rms_norm", "qwen3-4b", (16384, 2560), _MORE),
    Case("rms_norm", "gemma-2-2b", (16384, 2304), _MORE, _GEMMA_NORM),
    Case("rms_norm", "llama-3-8b", (64, 4096), ("roofline", "more", "host")),  # so little work that the host shows
    Case("add_rms_norm", "llama-3-8b", (16384, 4096), _ROOFLINE),
    Case("add_rms_norm", "qwen3-4b", (16384, 2560), _MORE),
    Case("layer_norm", "gpt-j-6b", (16384, 4096), _ROOFLINE),
    Case("layer_norm", "starcoder2-3b", (16384, 3072), _MORE),
    Case("rope", "llama-3-8b", (4, 4096, 32, 8, 128), _FIRST),
    Case("rope", "gemma-2-2b", (4, 4096, 8, 4, 256), _MORE),
    Case("rope", "helium-1-preview-2b", (4, 4096, 20, 20, 128), _MORE, {"layout": "interleaved"}),
    Case("rope", "deepseek-v3", (4, 4096, 128, 1, 64), _MORE, {"layout": "deinterleaved"}),
    Case("rope", "qwen2.5-vl-7b", (4, 4096, 28, 4, 128), _MORE, {"sections": (16, 24, 24)}),
    Case("qk_norm_rope", "qwen3-8b", (4, 4096, 32, 8, 128), _ROOFLINE),
    Case("qk_norm_rope", "gemma-3-4b", (4, 4096, 8, 4, 256), _MORE, _GEMMA_NORM),
    Case("swiglu", "llama-3-8b", (16384, 14336), _FIRST),
    Case("swiglu", "qwen3-4b", (16384, 9728), _MORE),
    Case("geglu", "gemma-2-9b", (16384, 14336), _FIRST, _TANH),
    Case("geglu", "gemma-2-2b", (16384, 9216), _MORE, _TANH),
    Case("relu2", "minitron-8b", (16384, 16384), _MORE),
    Case("moe_mlp", "qwen3-30b-a3b", (8192, 2048, 128, 768, 8), _MORE),
    Case("moe_mlp", "mixtral-8x7b", (8192, 4096, 8, 14336, 2), _MORE),
    Case("softmax", "llama-3-8b", (16384, 4096), _ROOFLINE),  # attention over 4096 keys
    Case("softmax", "gpt-2", (16384, 50257), _MORE),
    Case("cross_entropy_inplace", "llama-3-8b", (8192, 128256), _FIRST),
    Case("cross_entropy_inplace", "llama-2-7b", (8192, 32000), _FIRST),
    Case("cross_entropy", "llama-3-8b", (8192, 128256), _FIRST),
    Case("cross_entropy", "llama-2-7b", (8192, 32000)),
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256), _FIRST_LINEAR),
    Case("linear_cross_entropy", "llama-3-8b", (32768, 4096, 128256), _FIRST_LINEAR),
    Case("linear_cross_entropy", "gemma-2-2b", (8192, 2304, 256000), _FIRST_LINEAR),
    Case("linear_cross_entropy", "gemma-2-2b", (8192, 2304, 256000), _MORE, {"softcap": 30.0}),
    Case("linear_cross_entropy", "qwen3-1.7b", (16384, 2048, 151936), _FIRST_LINEAR),
    Case("linear_cross_entropy", "llama-3-8b", (1024, 4096, 128256), _LINEAR),
    Case("linear_cross_entropy", "llama-3-8b", (2048, 4096, 128256), _LINEAR),
    # As in instruction tuning; with a frozen head, as LoRA has it; as in evaluation.
    Case("linear_cross_entropy", "llama-3-8b", (16384, 4096, 128256), _MORE_LINEAR, ignored=0.75),
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256), _MORE_LINEAR, frozen=("linear_weight",)),
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256), _LINEAR, no_grad=True),
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256), _LINEAR, _FP32_SUM),
    Case("linear_cross_entropy", "qwen3-1.7b", (16384, 2048, 151936), _LINEAR, _FP32_SUM),
    Case("linear_cross_entropy", "llama-3-8b", (8192, 4096, 128256), _LINEAR, _RETURNED),
    Case("kl_div", "llama-3-8b", (4096, 128256), _ROOFLINE),
    Case("kl_div", "llama-3-8b", (4096, 128256), _MORE, {"log_target": True}),
    Case("jsd", "llama-3-8b", (4096, 128256), _ROOFLINE),
    Case("jsd", "llama-3-8b", (4096, 128256), _MORE, {"from_logits": True}),
    Case("tvd", "llama-3-8b", (4096, 128256), _MORE),
    Case("rms_norm", "small", (512, 1024), _SMALL),
    Case("add_rms_norm", "small", (512, 1024), _SMALL),
    Case("layer_norm", "small", (512, 1024), _SMALL),
    Case("rope", "small", (1, 256, 8, 2, 64), _SMALL),
    Case("qk_norm_rope", "small", (1, 256, 8, 2, 64), _SMALL),
    Case("swiglu", "small", (512, 2048), _SMALL),
    Case("geglu", "small", (512, 2048), _SMALL, _TANH),
    Case("relu2", "small", (512, 2048), _SMALL),
    Case("moe_mlp", "small", (256, 128, 8, 64, 2), _SMALL),
    Case("softmax", "small", (512, 1024), _SMALL),
    Case("cross_entropy_inplace", "small", (512, 16384), _SMALL),
    Case("cross_entropy", "small", (512, 16384), _SMALL),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL, ignored=0.75),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL, frozen=("linear_weight",)),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL, no_grad=True),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL, _FP32_SUM),
    Case("linear_cross_entropy", "small", (1024, 128, 16384), _SMALL, _RETURNED),
    Case("kl_div", "small", (256, 16384), _SMALL),
    Case("jsd", "small", (256, 16384), _SMALL),
    Case("tvd", "small", (256, 16384), _SMALL),
)

_WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_INTERMEDIATE = (2048, 4096, 8192, 14336, 28672)
_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_VOCABULARIES = (32000, 50304, 128256, 151936, 256000)

# One axis varied: pictures of speed and memory over the size.
_SWEEPS = (
    *(Case(op, "sweep", (4096, n), _SWEEP) for op in ("rms_norm", "add_rms_norm", "layer_norm") for n in _WIDTHS),
    *(Case(op, "sweep", (1, s, 32, 8, 128), _SWEEP) for op in ("rope", "qk_norm_rope") for s in _LENGTHS),
    *(Case("swiglu", "sweep", (4096, i), _SWEEP) for i in _INTERMEDIATE),
    *(Case("geglu", "sweep", (4096, i), _SWEEP, _TANH) for i in _INTERMEDIATE),
    *(Case("relu2", "sweep", (4096, i), _SWEEP) for i in _INTERMEDIATE),
    *(Case("moe_mlp", "sweep", (t, 2048, 128, 768, 8), _SWEEP) for t in _LENGTHS),
    *(Case("softmax", "sweep", (4096, n), _SWEEP) for n in _WIDTHS),
    *(Case("cross_entropy_inplace", "sweep", (4096, v), _SWEEP) for v in _VOCABULARIES),
    *(Case("cross_entropy", "sweep", (4096, v), _SWEEP) for v in _VOCABULARIES),
    *(Case("linear_cross_entropy", "sweep", (t, 4096, 128256), _SWEEP) for t in _LENGTHS),
    *(Case(op, "sweep", (2048, v), _SWEEP) for op in ("kl_div", "jsd", "tvd") for v in _VOCABULARIES),
)

CASES: tuple[Case, ...] = _MODELS + _SWEEPS


def select(ops: str | None, cases: str) -> list[Case]:
    """The cases of `ops` (None: all) that match `cases` (tags or parts of a name); both separated by commas.

    A word that is a tag selects by tag, "all" selects all; any other word selects the names it is a part of.

    Raises:
        ValueError: an unknown op, or nothing selected.

    Example:
        >>> [case.name for case in select("rope", "small")]
        ['rope/small/1x256x8x2x64']
    """
    wanted_ops = listed(ops) if ops else list(OPS)
    for op in wanted_ops:
        if op not in OPS:
            raise ValueError(f"bench: ops must be among {', '.join(OPS)}, got {op!r}")
    tags = {tag for case in CASES for tag in case.tags}
    words = listed(cases)

    def matches(case: Case) -> bool:
        return any(word == "all" or (word in case.tags if word in tags else word in case.name) for word in words)

    chosen = [case for case in CASES if case.op in wanted_ops and matches(case)]
    if not chosen:
        raise ValueError(
            f"bench: cases must match a tag ({', '.join(sorted(tags))}) or a part of a name (--list shows them), "
            f"got {cases!r} within ops {', '.join(wanted_ops)}"
        )
    return chosen


def tagged(name: str, tag: str) -> bool:
    """Whether the case of that name has the tag."""
    return any(case.name == name and tag in case.tags for case in CASES)


def listed(text: str | None) -> list[str]:
    """What a comma-separated option lists."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
