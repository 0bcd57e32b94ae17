"""Who computes an op: Tigon, eager Hugging Face code, torch.compile of it, torch's fused op, and peers where installed.

A provider is loaded for a case and then called with the case's tensors in order; it returns a tuple of outputs. Loading
may raise `ImportError` (not installed) or `Unsupported` (cannot do this case): a line in the report, never a crash.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

import tigon
from tigon.tools.bench import peers
from tigon.tools.bench.cases import OPS, Case, listed
from tigon.tools.bench.eager import EAGER
from tigon.tools.bench.inputs import Inputs
from tigon.tools.bench.peers import Unsupported

__all__ = ["PROVIDERS", "Provider", "Run", "Unsupported", "select", "tigon_provider"]

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    `destroys` names tensors that a call overwrites: each call gets a copy, made outside the measured part.
    With `autograd` False the call does its backward itself and returns gradients; its values are not checked.
    `prepare` makes what a call is given out of the case's inputs, outside the measured part, anew for each round.
    """

    name: str
    load: Callable[[Case], Run]
    destroys: tuple[str, ...] = ()
    note: str = ""
    autograd: bool = True
    needs_gpu: bool = False
    on_request: bool = False  # measured only when named
    prepare: Callable[[Case, Inputs], Inputs] = lambda case, inputs: inputs


# --- Tigon, eager, torch.compile -----------------------------------------------------------------


# Where an op is not the function of its name with the options of the case: function, fixed options, what it destroys.
_CALLS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "cross_entropy_inplace": ("cross_entropy", {"inplace": True}, ("input",)),
    "kl_div": ("kl_div", {"reduction": "batchmean"}, ()),
}


def tigon_provider(op: str, package: ModuleType = tigon, name: str = "tigon") -> Provider:
    """The op as `package` has it: this revision of Tigon, or another one."""
    function_name, fixed, destroys = _CALLS.get(op, (op, {}, ()))

    def load(case: Case) -> Run:
        function = getattr(package, function_name, None)
        if function is None:
            raise Unsupported(f"no {function_name} in this revision")
        if package is not tigon:
            lacking = [option for option in case.options if option not in inspect.signature(function).parameters]
            if lacking:
                raise Unsupported(f"no {', '.join(lacking)} in this revision")

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            result = function(*tensors, **case.options, **fixed)
            if not isinstance(result, tuple):
                return (result,)
            return tuple(output for output in result if output is not None)  # a LossOutput has what was asked for

        return run

    return Provider(name, load, destroys)


def _compiled(op: str) -> Callable[[Case], Run]:
    load = peers.transformers_experts if op == "moe_mlp" else EAGER[op]  # a loop over experts is no graph
    return lambda case: torch.compile(load(case), dynamic=False)


# What eager code is where one would not guess it.
_EAGER_NOTES = {
    "layer_norm": "F.layer_norm, which models call",
    "moe_mlp": "expert by expert, waiting for each",
    "softmax": "F.softmax in fp32, then rounded",
    "cross_entropy_inplace": "writes a new gradient buffer",
}


def _common(op: str) -> tuple[Provider, ...]:
    note = _EAGER_NOTES.get(op, "")
    return (
        tigon_provider(op),
        Provider("eager", EAGER[op], note=note),
        Provider("compile", _compiled(op), note=note),
    )


# --- peers ---------------------------------------------------------------------------------------


def _torch(load: Callable[[Case], Run], note: str) -> Provider:
    return Provider("torch", load, note=note)


def _liger(load: Callable[[Case], Run], *destroys: str, name: str = "liger", **options: object) -> Provider:
    return Provider(name, load, destroys, needs_gpu=True, **options)


def _cute(function: str, *destroys: str) -> Provider:
    return Provider("liger-cute", peers.liger_cute(function), destroys, needs_gpu=True)


def _quack(load: Callable[[Case], Run], *destroys: str, note: str = "") -> Provider:
    return Provider("quack", load, destroys, note, needs_gpu=True)


_PEERS: dict[str, tuple[Provider, ...]] = {
    "rms_norm": (
        _torch(peers.torch_rms_norm, "F.rms_norm"),
        _liger(peers.liger_rms_norm),
        _cute("rms_norm"),
        _quack(peers.quack_rms_norm),
    ),
    "add_rms_norm": (
        _liger(peers.liger_add_rms_norm),
        _cute("fused_add_rms_norm"),
        _quack(peers.quack_add_rms_norm),
    ),
    "layer_norm": (_liger(peers.liger_layer_norm), _cute("layer_norm")),
    # Its rope writes over q, k and the incoming gradients.
    "rope": (_liger(peers.liger_rope, "q", "k", "upstream"), _quack(peers.quack_rope)),
    "qk_norm_rope": (
        _liger(peers.liger_qk_norm_rope, "upstream", note="its norm of each head, then its rope"),
        _quack(peers.quack_qk_norm_rope),
    ),
    "swiglu": (_liger(peers.liger_swiglu, "gate", "up"), _cute("swiglu", "gate", "up")),
    "geglu": (_liger(peers.liger_geglu, "gate", "up"), _cute("geglu", "gate", "up")),
    "relu2": (_liger(peers.liger_relu2),),
    "moe_mlp": (
        Provider("grouped_mm", peers.transformers_experts, note="what transformers runs by default"),
        _liger(peers.liger_moe_mlp),
    ),
    "softmax": (
        _torch(peers.torch_softmax, "F.softmax"),
        _liger(peers.liger_softmax),
        _cute("softmax"),
        _quack(peers.quack_softmax),
    ),
    "cross_entropy": (
        _torch(peers.torch_cross_entropy, "loss in bf16"),
        _liger(peers.liger_cross_entropy(copy=True), note="in place on a clone of the logits"),
        _quack(peers.quack_cross_entropy(inplace=False)),
    ),
    "cross_entropy_inplace": (
        _liger(peers.liger_cross_entropy(copy=False), "input"),
        _quack(peers.quack_cross_entropy(inplace=True), "input"),
    ),
    "linear_cross_entropy": (
        _torch(peers.torch_linear_cross_entropy, "F.linear_cross_entropy"),
        _liger(peers.liger_linear_cross_entropy(None)),
        _liger(peers.liger_linear_cross_entropy(torch.float32), name="liger-fp32", on_request=True),
        Provider("cce", peers.cce(exact=False), needs_gpu=True, note="skips small gradients"),
        Provider("cce-exact", peers.cce(exact=True), needs_gpu=True, on_request=True),
        _quack(peers.quack_linear_cross_entropy, note="chunks of 4096 tokens, of 8192 where H is 4096"),
        Provider("trl", peers.trl_linear_cross_entropy, needs_gpu=True, note="four products"),
        Provider(
            "products",
            peers.products,
            autograd=False,
            prepare=peers.with_dlogits,
            note="the matrix products alone, of the same operands: the floor",
        ),
    ),
    "kl_div": (
        _torch(peers.torch_kl_div, "F.kl_div, loss in bf16"),
        _liger(peers.liger_kl_div),
        _cute("kl_div"),
    ),
    "jsd": (_liger(peers.liger_jsd),),
    "tvd": (_liger(peers.liger_tvd),),
}

PROVIDERS: dict[str, tuple[Provider, ...]] = {op: (*_common(op), *_PEERS[op]) for op in OPS}


def select(op: str, words: str | None) -> list[Provider]:
    """The providers of `op` that `words` names: None the usual ones, "a,b" just those, "-a" the usual ones less a.

    Raises:
        ValueError: a name that no op has.

    Example:
        >>> [provider.name for provider in select("rope", "-compile")]
        ['tigon', 'eager', 'liger', 'quack']
    """
    wanted = listed(words)
    names = {provider.name for row in PROVIDERS.values() for provider in row}
    for word in wanted:
        if word.removeprefix("-") not in names:
            raise ValueError(f"bench: providers must be among {', '.join(sorted(names))} (-name drops), got {word!r}")
    dropped = {word[1:] for word in wanted if word.startswith("-")}
    kept = {word for word in wanted if not word.startswith("-")}
    return [
        provider
        for provider in PROVIDERS[op]
        if provider.name not in dropped and (provider.name in kept if kept else not provider.on_request)
    ]
