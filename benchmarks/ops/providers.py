"""The providers of each op: Tigon, eager Hugging Face code, torch.compile of it, torch's fused op, and other packages.

A provider is loaded for a case and then called with the case's tensors in order; it returns a tuple of outputs. Loading
raises `ImportError` if a package is not installed and `Unsupported` if the provider cannot compute the case. Both
become a line in the report and never end the run.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import tigon
from benchmarks.ops import floor, peers
from benchmarks.ops.cases import OPS, split_words
from benchmarks.ops.eager import Run, eager_code
from benchmarks.ops.peers import Unsupported
from benchmarks.workloads import Case, Inputs
from benchmarks.workloads.workload import tensors_of


@dataclass(frozen=True)
class Provider:
    """One implementation of an op. `overwrites` names the tensors that a call overwrites. Each call gets copies of
    them, which are written outside the measured part. With `autograd` False the call computes its gradients itself and
    returns them, and the benchmark does not check their values. `prepare` computes the arguments of a call from the
    case's inputs; it runs once for each round, outside the measured part."""

    name: str
    load: Callable[[Case], Run]
    overwrites: tuple[str, ...] = ()
    note: str = ""
    autograd: bool = True
    prepare: Callable[[Case, Inputs], Inputs] = lambda case, inputs: inputs

    @property
    def needs_gpu(self) -> bool:
        return self.name in ("liger", "liger-cute", "quack", "fla", "causal-conv1d", "cce", "trl")


def tigon_provider(op: str, package: ModuleType = tigon, name: str = "tigon") -> Provider:
    """Return the provider of the op in `package`, which is this revision of Tigon or another one."""
    workload = OPS[op]

    def load(case: Case) -> Run:
        function = workload.function_in(package)
        if function is None:
            raise Unsupported(f"no {workload.function or op} in this revision")
        if workload.call is not None:
            return _with_options(functools.partial(workload.call, function), case)
        if package is not tigon:
            unknown = [option for option in case.options if option not in inspect.signature(function).parameters]
            if unknown:
                raise Unsupported(f"no {', '.join(unknown)} in this revision")
        return _with_options(function, case)

    return Provider(name, load)


def _with_options(function: Callable[..., Any], case: Case) -> Run:
    options = {**case.options, **OPS[case.op].bench_options}
    return lambda *tensors: tensors_of(function(*tensors, **options))


def _compiled(op: str) -> Callable[[Case], Run]:
    # Eager code loops over the experts, and a loop over experts is not one graph.
    graphs = {"moe_mlp": peers.transformers_experts, "lora_moe_mlp": peers.peft_experts}
    load = graphs.get(op) or eager_code(op)
    return lambda case: torch.compile(load(case), dynamic=False)


# These notes describe eager code that a reader would not expect.
_EAGER_NOTES = {
    "layer_norm": "F.layer_norm, which models call",
    **dict.fromkeys(("gated_delta_rule", "kda", "ssd"), "the chunked code of transformers in torch"),
    "moe_mlp": "expert by expert, waiting for each",
    "load_balancing_loss": "the code of transformers, which waits for each layer",
    "cross_entropy": "F.cross_entropy of logits in fp32",
    "linear_cross_entropy": "F.cross_entropy of all logits in fp32",
}


def _common(op: str) -> tuple[Provider, ...]:
    note = _EAGER_NOTES.get(op, "the reference of the op")
    return (
        tigon_provider(op),
        Provider("eager", eager_code(op), note=note),
        Provider("compile", _compiled(op), note=note),
    )


def _liger(load: Callable[[Case], Run] | str, *overwrites: str, note: str = "") -> Provider:
    """Return Liger with a loader, or with the autograd function of this name."""
    if isinstance(load, str):
        load = peers.call(f"liger_kernel.ops:Liger{load}Function.apply")
    return Provider("liger", load, overwrites, note)


def _cute(function: str, *overwrites: str) -> Provider:
    return Provider("liger-cute", peers.liger_cute(function), overwrites)


_FLOOR = Provider(
    "products",
    floor.products,
    note="the matrix products alone, of the same operands: the floor",
    autograd=False,
    prepare=floor.with_dlogits,
)

_PEERS: dict[str, tuple[Provider, ...]] = {
    "rms_norm": (
        Provider(
            "torch",
            peers.torch_function(lambda case: lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6)),
            note="F.rms_norm",
        ),
        _liger(peers.liger_norm("LigerRMSNormFunction")),
        _cute("rms_norm"),
        Provider("quack", peers.quack_norm),
    ),
    "add_rms_norm": (
        _liger(peers.liger_norm("LigerFusedAddRMSNormFunction")),
        _cute("fused_add_rms_norm"),
        Provider("quack", peers.quack_norm),
    ),
    "gated_rms_norm": (Provider("fla", peers.fla_gated_rms_norm),),
    "gated_delta_rule": (Provider("fla", peers.fla_delta_rule, note="keys and queries repeated"),),
    "kda": (Provider("fla", peers.fla_delta_rule),),
    "layer_norm": (_liger(peers.call("liger_kernel.ops:LigerLayerNormFunction.apply", 1e-5)), _cute("layer_norm")),
    # Liger's rope overwrites q, k and the upstream gradients.
    "rope": (_liger(peers.liger_rope, "q", "k", "upstream"), Provider("quack", peers.quack_rope)),
    "qk_norm_rope": (
        _liger(peers.liger_qk_norm_rope, "upstream", note="its norm of each head, then its rope"),
        Provider("quack", peers.quack_qk_norm_rope),
    ),
    "causal_conv1d": (
        Provider("torch", peers.convolution(lambda: peers.stock_convolution), note="F.conv1d and F.silu"),
        Provider("causal-conv1d", peers.convolution(peers.imported_convolution)),
    ),
    "swiglu": (_liger("SiLUMul", "gate", "up"), _cute("swiglu", "gate", "up")),
    "geglu": (_liger(peers.liger_geglu, "gate", "up"), _cute("geglu", "gate", "up")),
    "relu2": (_liger("ReLUSquared"),),
    "moe_mlp": (
        Provider("grouped_mm", peers.transformers_experts, note="what transformers runs by default"),
        _liger(peers.liger_moe_mlp),
    ),
    "lora_moe_mlp": (Provider("peft", peers.peft_experts, note="W + s B A, then what transformers runs by default"),),
    "softmax": (
        Provider("torch", peers.torch_function(lambda case: lambda x: F.softmax(x, -1)), note="F.softmax"),
        _liger("Softmax"),
        _cute("softmax"),
        Provider("quack", peers.call("quack:softmax")),
    ),
    "cross_entropy": (
        Provider("torch", peers.torch_function(lambda case: F.cross_entropy), note="loss in bf16"),
        _liger(peers.LIGER_LOSSES["cross_entropy"], note="in place on a clone of the logits"),
        Provider("quack", peers.call("quack:cross_entropy", inplace_backward=False)),
    ),
    "linear_cross_entropy": (
        Provider("torch", peers.torch_linear_cross_entropy, note="F.linear_cross_entropy"),
        _liger(peers.LIGER_LOSSES["linear_cross_entropy"]),
        Provider("cce", peers.cce, note="skips small gradients"),
        Provider("quack", peers.quack_linear_cross_entropy, note="chunks of 4096 tokens, of 8192 where H is 4096"),
        Provider("trl", peers.trl_linear_log_probs, note="four products"),
        _FLOOR,
    ),
    "linear_log_probs": (Provider("trl", peers.trl_linear_log_probs), _FLOOR),
    "linear_distillation": (
        _liger(peers.LIGER_LOSSES["linear_distillation"]),
        Provider("trl", peers.trl_linear_distillation),
        _FLOOR,
    ),
    **{
        f"{name}_loss": (_liger(peers.LIGER_LOSSES[f"{name}_loss"]), _FLOOR)
        for name in ("dpo", "orpo", "simpo", "kto", "grpo")
    },
    "kl_div": (
        Provider(
            "torch",
            peers.torch_function(
                lambda case: functools.partial(F.kl_div, reduction="batchmean", **case.options), "log_target"
            ),
            note="F.kl_div, loss in bf16",
        ),
        _liger(peers.LIGER_LOSSES["kl_div"]),
        _cute("kl_div"),
    ),
    "jsd": (_liger(peers.LIGER_LOSSES["jsd"]),),
    "tvd": (_liger(peers.LIGER_LOSSES["tvd"]),),
}

PROVIDERS: dict[str, tuple[Provider, ...]] = {op: (*_common(op), *_PEERS.get(op, ())) for op in OPS}


def select(op: str, words: str | None) -> list[Provider]:
    """Return the providers of `op` that `words` names, in the form of the option `--providers`.

    None stands for all of them, "a,b" for a and b alone, and "-a" for all but a.

    >>> [provider.name for provider in select("rope", "-compile")]
    ['tigon', 'eager', 'liger', 'quack']
    """
    names = {provider.name for row in PROVIDERS.values() for provider in row}
    for word in split_words(words):
        if word.removeprefix("-") not in names:
            raise ValueError(
                f"bench: providers must be among {', '.join(sorted(names))} (-NAME excludes one), got {word!r}"
            )
    excluded_names = {word[1:] for word in split_words(words) if word.startswith("-")}
    included_names = {word for word in split_words(words) if not word.startswith("-")}
    return [
        provider
        for provider in PROVIDERS[op]
        if provider.name not in excluded_names and (not included_names or provider.name in included_names)
    ]
