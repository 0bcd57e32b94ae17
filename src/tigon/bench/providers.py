"""Who computes an op: Tigon, eager Hugging Face code, torch.compile of it, torch's fused op, and peers where installed.

A provider is loaded for a case and then called with the case's tensors in order; it returns a tuple of outputs. Loading
may raise `ImportError` (not installed) or `Unsupported` (cannot do this case): a line in the report, never a crash.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.bench.cases import Case

__all__ = ["EAGER", "PROVIDERS", "Provider", "Run", "Unsupported", "head_logits", "select"]

Run = Callable[..., tuple[Tensor, ...]]


class Unsupported(Exception):
    """The provider cannot compute this case; the message says why."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    `destroys` names tensors that a call overwrites: each call gets a copy, made outside the measured part.
    With `autograd` False the call does its backward itself and returns gradients; its values are not checked.
    """

    name: str
    load: Callable[[Case], Run]
    destroys: tuple[str, ...] = ()
    note: str = ""
    autograd: bool = True
    needs_gpu: bool = False
    on_request: bool = False  # measured only when named


# --- eager: the operations that Hugging Face models run, one by one --------------------------------


def _eager_rms_norm(case: Case) -> Run:
    offset, after_weight = case.options.get("offset", 0.0), case.options.get("rounding") == "after_weight"

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        x_hat = x if x.dtype == torch.float64 else x.float()  # fp64 for exact results only
        x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + 1e-6)
        if after_weight:
            return ((x_hat * (offset + weight.to(x_hat.dtype))).to(x.dtype),)
        return ((offset + weight if offset else weight) * x_hat.to(x.dtype),)

    return run


def _eager_rope(case: Case) -> Run:
    def turn(x: Tensor) -> Tensor:  # the second half, negated, before the first
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    return run


def _eager_cross_entropy(case: Case) -> Run:
    return lambda input, target: (F.cross_entropy(input.float(), target),)


def head_logits(input: Tensor, linear_weight: Tensor, softcap: float | None) -> Tensor:
    """Logits as a model's head makes them: [T, H], [V, H] -> [T, V] in the dtype of the inputs."""
    logits = F.linear(input, linear_weight)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _eager_linear_cross_entropy(case: Case) -> Run:
    softcap = case.options.get("softcap")

    def run(input: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor]:
        return (F.cross_entropy(head_logits(input, linear_weight, softcap).float(), target),)

    return run


EAGER: dict[str, Callable[[Case], Run]] = {
    "rms_norm": _eager_rms_norm,
    "rope": _eager_rope,
    "swiglu": lambda case: lambda gate, up: (F.silu(gate) * up,),
    "geglu": lambda case: lambda gate, up: (F.gelu(gate, **case.options) * up,),
    "cross_entropy": _eager_cross_entropy,
    "cross_entropy_inplace": _eager_cross_entropy,
    "linear_cross_entropy": _eager_linear_cross_entropy,
}


def _compiled(op: str) -> Callable[[Case], Run]:
    return lambda case: torch.compile(EAGER[op](case), dynamic=False)


# --- torch's own ---------------------------------------------------------------------------------


def _torch_rms_norm(case: Case) -> Run:
    if case.options:
        raise Unsupported("no offset and no choice of rounding")
    return lambda x, weight: (F.rms_norm(x, weight.shape, weight, 1e-6),)


def _torch_linear_cross_entropy(case: Case) -> Run:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unsupported("torch.nn.functional.linear_cross_entropy is in torch 2.13 and later")
    if case.options:
        raise Unsupported(f"no {', '.join(case.options)}")
    return lambda input, linear_weight, target: (F.linear_cross_entropy(input, linear_weight, target),)


# --- Tigon ---------------------------------------------------------------------------------------


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _tigon(name: str, **fixed: object) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        op = getattr(tigon, name)
        return lambda *tensors: _tuple(op(*tensors, **case.options, **fixed))

    return load


# --- Liger ---------------------------------------------------------------------------------------


def _liger_rms_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerRMSNormFunction

    casting = "gemma" if case.options.get("rounding") == "after_weight" else "llama"
    offset = case.options.get("offset", 0.0)
    return lambda x, weight: (LigerRMSNormFunction.apply(x, weight, 1e-6, offset, casting, False),)


def _liger_rope(case: Case) -> Run:
    from liger_kernel.transformers import liger_rotary_pos_emb

    return lambda q, k, cos, sin: tuple(liger_rotary_pos_emb(q, k, cos, sin))


def _liger_swiglu(case: Case) -> Run:
    from liger_kernel.ops import LigerSiLUMulFunction

    return lambda gate, up: (LigerSiLUMulFunction.apply(gate, up),)


def _liger_geglu(case: Case) -> Run:
    from liger_kernel.ops import LigerGELUMulFunction

    if case.options.get("approximate") != "tanh":
        raise Unsupported("tanh only")
    return lambda gate, up: (LigerGELUMulFunction.apply(gate, up),)


def _liger_cross_entropy(copy: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss()
        return lambda input, target: (loss(input.clone() if copy else input, target),)

    return load


def _liger_linear_cross_entropy(accum_dtype: torch.dtype | None) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(softcap=case.options.get("softcap"), accum_dtype=accum_dtype)
        return lambda input, linear_weight, target: (loss(linear_weight, input, target),)

    return load


# --- cut-cross-entropy, and the floor ------------------------------------------------------------


def _cce(exact: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from cut_cross_entropy import linear_cross_entropy

        options = {"impl": "cce", "softcap": case.options.get("softcap"), **({"filter_eps": None} if exact else {})}
        return lambda input, linear_weight, target: (linear_cross_entropy(input, linear_weight, target, **options),)

    return load


def _products(case: Case) -> Run:
    """Logits and the gradients asked for as bare products of the valid rows, a chunk at a time, and no softmax."""
    valid = round(case.shape[0] * (1 - case.ignored))

    def run(input: Tensor, linear_weight: Tensor, target: Tensor, chunk: int = 8192) -> tuple[Tensor, ...]:
        with torch.no_grad():
            dinput = torch.empty_like(input) if input.requires_grad else None
            dweight = None
            for start in range(0, valid, chunk):
                rows = slice(start, min(start + chunk, valid))
                logits = F.linear(input[rows], linear_weight)
                if dinput is not None:
                    torch.mm(logits, linear_weight, out=dinput[rows])
                if linear_weight.requires_grad and dweight is None:
                    dweight = logits.t() @ input[rows]
                elif linear_weight.requires_grad:
                    dweight.addmm_(logits.t(), input[rows])
            return tuple(gradient for gradient in (dinput, dweight) if gradient is not None)

    return run


# --- the table -----------------------------------------------------------------------------------


def _common(op: str, tigon_provider: Provider, eager_note: str = "") -> tuple[Provider, ...]:
    return (
        tigon_provider,
        Provider("eager", EAGER[op], note=eager_note),
        Provider("compile", _compiled(op), note=eager_note),
    )


_NEW_BUFFER = "writes a new gradient buffer"

PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "rms_norm": (
        *_common("rms_norm", Provider("tigon", _tigon("rms_norm"))),
        Provider("torch", _torch_rms_norm, note="F.rms_norm"),
        Provider("liger", _liger_rms_norm, needs_gpu=True),
    ),
    "rope": (
        *_common("rope", Provider("tigon", _tigon("rope"))),
        Provider("liger", _liger_rope, destroys=("q", "k", "upstream"), needs_gpu=True),
    ),
    "swiglu": (
        *_common("swiglu", Provider("tigon", _tigon("swiglu"))),
        Provider("liger", _liger_swiglu, destroys=("gate", "up"), needs_gpu=True),
    ),
    "geglu": (
        *_common("geglu", Provider("tigon", _tigon("geglu"))),
        Provider("liger", _liger_geglu, destroys=("gate", "up"), needs_gpu=True),
    ),
    "cross_entropy": (
        *_common("cross_entropy", Provider("tigon", _tigon("cross_entropy"))),
        Provider("torch", lambda case: lambda input, target: (F.cross_entropy(input, target),), note="loss in bf16"),
        Provider("liger", _liger_cross_entropy(copy=True), needs_gpu=True, note="in place on a clone of the logits"),
    ),
    "cross_entropy_inplace": (
        *_common(
            "cross_entropy_inplace",
            Provider("tigon", _tigon("cross_entropy", inplace=True), destroys=("input",)),
            eager_note=_NEW_BUFFER,
        ),
        Provider("liger", _liger_cross_entropy(copy=False), destroys=("input",), needs_gpu=True),
    ),
    "linear_cross_entropy": (
        *_common("linear_cross_entropy", Provider("tigon", _tigon("linear_cross_entropy"))),
        Provider("torch", _torch_linear_cross_entropy, note="F.linear_cross_entropy"),
        Provider("liger", _liger_linear_cross_entropy(None), needs_gpu=True),
        Provider("liger-fp32", _liger_linear_cross_entropy(torch.float32), needs_gpu=True, on_request=True),
        Provider("cce", _cce(exact=False), needs_gpu=True, note="skips small gradients"),
        Provider("cce-exact", _cce(exact=True), needs_gpu=True, on_request=True),
        Provider("products", _products, autograd=False, note="the three matrix products alone: the floor"),
    ),
}  # fmt: skip


def select(op: str, words: str | None) -> list[Provider]:
    """The providers of `op` that `words` names: None the usual ones, "a,b" just those, "-a" the usual ones less a.

    Raises:
        ValueError: a name that no op has.

    Example:
        >>> [provider.name for provider in select("rope", "-compile")]
        ['tigon', 'eager', 'liger']
    """
    listed = [word.strip() for word in (words or "").split(",") if word.strip()]
    names = {provider.name for row in PROVIDERS.values() for provider in row}
    for word in listed:
        if word.removeprefix("-") not in names:
            raise ValueError(f"bench: providers must be among {', '.join(sorted(names))} (-name drops), got {word!r}")
    dropped = {word[1:] for word in listed if word.startswith("-")}
    kept = {word for word in listed if not word.startswith("-")}
    return [
        provider
        for provider in PROVIDERS[op]
        if provider.name not in dropped and (provider.name in kept if kept else not provider.on_request)
    ]
