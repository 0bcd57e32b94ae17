"""Every public function and module refuses undocumented values. The error names the op and precedes every write.

Each argument of each call is replaced by each of `VALUES` in turn. A call that raises must raise a TypeError or a
ValueError whose message begins with the name of the op. A call that works must pass a value that `_accepted` names, so
that no string passes as a flag, no boolean as a number and no number as a dimension.
"""

import inspect
from collections.abc import Callable
from types import NoneType
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import tigon
from benchmarks.workloads import WORKLOADS
from op_cases import DEVICE

pytestmark = pytest.mark.no_interpreter("Every check precedes the choice of a kernel.")


class _Object:
    """A value of a type that no op knows."""


VALUES: dict[str, object] = {
    "None": None, "str": "no", "empty str": "", "list": [1.0], "list of strs": ["a", "b"], "dict": {}, "True": True,
    "False": False, "float": 0.5, "nan": float("nan"), "inf": float("inf"), "1e60": 1e60, "int": 1, "-1": -1,
    "2**70": 2**70, "10**5000": 10**5000, "complex": 1j, "np.float32": np.float32(0.5), "np.int64": np.int64(1),
    "np.bool": np.True_, "np.array": np.ones(3, dtype=np.float32), "object": _Object(), "function": len,
    "torch.float16": torch.float16, "torch.float32": torch.float32, "torch.int32": torch.int32,
    "torch.float8_e4m3fn": torch.float8_e4m3fn, "scalar": torch.tensor(1.0, device=DEVICE),
    "scalar of int": torch.tensor(1, device=DEVICE), "scalar of bool": torch.tensor(True, device=DEVICE),
    "scalar on meta": torch.tensor(1.0, device="meta"),
    "tensor of 5 dimensions": torch.ones(1, 1, 1, 2, 8, device=DEVICE), "empty tensor": torch.empty(0, device=DEVICE),
    "tensor of complex numbers": torch.ones(3, dtype=torch.complex64, device=DEVICE),
}  # fmt: skip
# These functions change a tensor argument.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda x: x.to("meta"), "bool": lambda x: x.bool(), "int16": lambda x: x.to(torch.int16),
    "another float": lambda x: x.to(torch.float16), "fp8": lambda x: x.float().to(torch.float8_e4m3fn),
    "one dimension more": lambda x: x[None],
    "one element more": lambda x: torch.cat((x, x[..., -1:]), -1) if x.dim() else x[None],
    "one dimension less": lambda x: x[0] if x.dim() else x,
}  # fmt: skip


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def _parameter(*shape: int) -> Tensor:
    return _randn(*shape).requires_grad_()


def _index(*shape: int, high: int = 8) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


X, LOGITS, TARGET = _parameter(4, 8), _parameter(4, 8), _index(4)
LINEAR = {"input": X, "linear_weight": _parameter(10, 8), "target": TARGET}
LINEAR["linear_weight"].grad = torch.zeros_like(LINEAR["linear_weight"])
MOE = {
    "x": X, "up_proj": _parameter(3, 8, 8), "down_proj": _parameter(3, 8, 4),
    "top_k_index": _index(4, 2, high=3), "top_k_weights": _parameter(4, 2),
}  # fmt: skip
ROPE = {"q": _parameter(2, 4, 5, 8), "k": _parameter(2, 2, 5, 8), "cos": _randn(1, 5, 8), "sin": _randn(1, 5, 8)}
MLP = {"x": X, "gate_weight": _parameter(6, 8), "up_weight": _parameter(6, 8), "down_weight": _parameter(8, 6)}
DISTRIBUTIONS = {"input": LOGITS, "target": _randn(4, 8), "labels": TARGET}

# The arguments of a call that works. All other parameters of the function are tried too. An op that this table does not
# have gets the inputs of its workload.
FUNCTIONS: dict[str, dict[str, object]] = {
    "rms_norm": {"x": X, "weight": _parameter(8)},
    "add_rms_norm": {"x": X, "residual": _parameter(4, 8), "weight": _parameter(8)},
    "layer_norm": {"x": X, "weight": _parameter(8), "bias": _parameter(8)},
    "swiglu": {"gate": X, "up": _parameter(4, 8)},
    "geglu": {"gate": X, "up": _parameter(4, 8)},
    "gelu": {"x": X},
    "relu2": {"x": X},
    "softmax": {"x": X},
    "causal_conv1d": {
        "x": _parameter(1, 8, 8),
        "weight": _parameter(8, 4),
        "bias": _parameter(8),
        "cu_seqlens": torch.tensor([0, 1, 8], device=DEVICE),
    },
    "glu_mlp": MLP,
    "fp8_linear": {"x": _parameter(4, 16), "weight": _parameter(32, 16), "bias": _parameter(32)},
    "mlp": {
        "x": X, "up_weight": _parameter(6, 8), "down_weight": _parameter(8, 6), "up_bias": _parameter(6),
        "down_bias": _parameter(8),
    },
    "moe_mlp": MOE | {"up_bias": _parameter(3, 8), "down_bias": _parameter(3, 8)},
    "load_balancing_loss": {
        "router_logits": _parameter(4, 8), "num_experts": 8, "top_k": 2, "attention_mask": _index(4, high=2)
    },
    "lora_moe_mlp": MOE | {
        "up_a": _parameter(3, 2, 8), "up_b": _parameter(3, 8, 2), "down_a": _parameter(3, 2, 4),
        "down_b": _parameter(3, 8, 2),
    },
    "rope": ROPE,
    "qk_norm_rope": ROPE | {"q_weight": _parameter(8), "k_weight": _parameter(8)},
    "cross_entropy": {"input": LOGITS, "target": TARGET, "weight": _randn(8), "inplace": True},
    "linear_cross_entropy": LINEAR | {"linear_bias": _parameter(10), "weight": _randn(10), "accumulate_grad": True},
    "linear_log_probs": {
        "hidden": X, "weight": _parameter(10, 8), "targets": TARGET, "bias": _parameter(10),
        "extra_targets": _index(4, 3),
    },
    "kl_div": DISTRIBUTIONS,
    "jsd": DISTRIBUTIONS,
    "tvd": DISTRIBUTIONS,
    "ValidRows": {"target": TARGET},
    "AdamW": {"params": [_parameter(3)]},
    "Muon": {"params": [_parameter(3, 4)]},
    "muon_groups": {"model": torch.nn.Linear(4, 3)},
}  # fmt: skip
for workload in WORKLOADS.values():
    if workload.name in set(tigon.__all__) - set(FUNCTIONS):
        sizes = (4, 8) if len(workload.legend.split(" x ")) == 2 else workload.test_variants[0].sizes
        FUNCTIONS[workload.name] = dict(workload.make_inputs(sizes, torch.float32, torch.device(DEVICE)).tensors)
# For each module: the arguments of its constructor and of its call, and the options in its constructor's **options.
MODULES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "RMSNorm": ({"normalized_shape": 8}, {"x": X}, "device dtype"),
    "LayerNorm": ({"normalized_shape": 8}, {"x": X}, "device dtype"),
    "SwiGLUMLP": ({"hidden_size": 8, "intermediate_size": 6}, {"x": X}, "device dtype"),
    "GEGLUMLP": ({"hidden_size": 8, "intermediate_size": 6}, {"x": X}, "device dtype"),
    "ReLU2MLP": ({"hidden_size": 8, "intermediate_size": 6}, {"x": X}, "device dtype"), "Softmax": ({}, {"x": X}, ""),
    "CrossEntropyLoss": (
        {"weight": _randn(8)}, {"input": LOGITS, "target": TARGET},
        "softcap logit_scale z_loss token_scaling inplace return_z_loss return_entropy",
    ),
    "LinearCrossEntropyLoss": (
        {"weight": _randn(10)}, LINEAR, "reduction acc_dtype accumulate_grad process_group vocab_size max_logits_mib",
    ),
    "KLDivLoss": ({}, DISTRIBUTIONS, "from_logits temperature ignore_index"),
    "JSDLoss": ({}, DISTRIBUTIONS, "from_logits temperature reduction"),
    "TVDLoss": ({}, DISTRIBUTIONS, "from_logits temperature"),
}  # fmt: skip
HIDDEN = {"AdamW": "maximize foreach capturable differentiable fused"}
# The function whose refusals a module passes on.
COMPUTED_BY = {
    "RMSNorm": "rms_norm", "LayerNorm": "layer_norm", "Softmax": "softmax", "CrossEntropyLoss": "cross_entropy",
    "LinearCrossEntropyLoss": "linear_cross_entropy", "KLDivLoss": "kl_div", "JSDLoss": "jsd", "TVDLoss": "tvd",
}  # fmt: skip
# Other files test these names, because they take models, functions or blocks of code, or are results.
TESTED_IN_OTHER_FILES = {
    "patch", "patched", "lean", "AutoModelForCausalLM",
    "AutoModelForImageTextToText", "AutoModelForSequenceClassification", "LossOutput", "LogProbOutput", "linear_loss",
    "DistillationOutput", "DistillationLoss", "install_as_liger_kernel", "Memory",
    "DPOLoss", "CPOLoss", "SimPOLoss", "ORPOLoss", "KTOLoss", "GRPOLoss", "PPOLoss", "RLOOLoss",
    "step_in_backward",
}  # fmt: skip

FLAG = {"True", "False"}
POSITIVE = {"float", "int", "2**70"}
NUMBER = POSITIVE | {"-1"}
OPTIONAL = {"None"}
FLOAT = {"another float"}
LEADING = {"tensor of 5 dimensions", "one dimension more", "one dimension less"}
ANY_SHAPE = LEADING | FLOAT | {"scalar", "scalar on meta", "empty tensor", "one element more", "meta"}
# Flags that some signature hides in **options.
FLAGS = {
    "inplace", "token_scaling", "accumulate_grad", "from_logits", "return_z_loss", "return_entropy", "maximize",
    "capturable", "differentiable",
}  # fmt: skip

# The values that an argument of this type takes. Arguments of other types, such as tensors, take none of `VALUES`.
ACCEPTED_BY_TYPE: dict[object, set[str]] = {bool: FLAG, float: POSITIVE, NoneType: OPTIONAL}

# The values that an argument of this name is documented to take, unless `ACCEPTED_BY_OP` has other values for the op. A
# name that is missing here takes those of its type.
ACCEPTED: dict[str, set[str]] = {
    **dict.fromkeys(FLAGS, FLAG),
    "x": LEADING | FLOAT,
    "offset": NUMBER, "logit_scale": NUMBER, "z_loss": POSITIVE, "softcap": POSITIVE | OPTIONAL, "scaling": NUMBER,
    "label_smoothing": {"float", "int"}, "beta": {"float", "int"}, "temperature": {"int"}, "dropout": {"float"},
    "weight": OPTIONAL | FLOAT, "bias": OPTIONAL | FLOAT, "residual": FLOAT, "input": FLOAT, "q": FLOAT,
    "top_k_weights": FLOAT, "process_group": OPTIONAL, "vocab_size": OPTIONAL, "unsqueeze_dim": {"int"},
    "dim": {"int", "-1"}, "dtype": OPTIONAL | {"torch.float32", "torch.float16"},
    "ignore_index": {"int", "-1"}, "valid_rows": OPTIONAL | {"False"}, "acc_dtype": OPTIONAL | {"torch.float32"},
    "num_items": POSITIVE | OPTIONAL | {"scalar", "scalar of int"},
    "max_logits_mib": OPTIONAL | {"int", "2**70"}, "intermediate_size": {"int"},
    # A device of None is the CPU.
    "device": OPTIONAL if DEVICE == "cpu" else set(),
    "foreach": FLAG | OPTIONAL, "fused": FLAG | OPTIONAL,
}  # fmt: skip
RATE = {"float", "int", "1e60", "2**70", "np.float32", "np.int64", "scalar", "scalar of int"}
ACCEPTED_BY_OP: dict[tuple[str, str], set[str]] = {
    **{(workload.name, name): ANY_SHAPE for workload in WORKLOADS.values() for name in workload.any_shape},
    ("Softmax", "x"): ANY_SHAPE,
    **{(op, "x"): LEADING for op in ("glu_mlp", "mlp", "lora_linear", "SwiGLUMLP", "GEGLUMLP", "ReLU2MLP")},
    **{(op, "bias"): FLAG for op in ("LayerNorm", "SwiGLUMLP", "GEGLUMLP", "ReLU2MLP")},
    **{(op, "dtype"): OPTIONAL | {"torch.float32"} for op in ("SwiGLUMLP", "GEGLUMLP", "ReLU2MLP")},
    **{(op, "ignore_index"): {"int", "-1", "None"} for op in ("cross_entropy", "linear_cross_entropy", "ValidRows")},
    **{(op, "target"): FLOAT for op in ("kl_div", "jsd", "tvd", "KLDivLoss", "JSDLoss", "TVDLoss")},
    **{(op, "input"): set() for op in ("linear_cross_entropy", "LinearCrossEntropyLoss")},
    **{("AdamW", name): RATE for name in ("lr", "eps", "weight_decay")},
    ("Muon", "lr"): RATE,
    **{("Muon", name): RATE - {"scalar", "scalar of int"} for name in ("weight_decay", "eps")},
    ("Muon", "momentum"): {"float", "int", "np.float32", "np.int64"},
    ("Muon", "ns_steps"): {"int"},
    ("Muon", "adjust_lr_fn"): OPTIONAL,
    ("AdamW", "max_grad_norm"): POSITIVE | OPTIONAL | {"inf"},
    **{("KLDivLoss", name): FLAG | OPTIONAL for name in ("size_average", "reduce")},
    ("KLDivLoss", "reduction"): set(),
    ("CrossEntropyLoss", "ignore_index"): {"int", "-1", "None"},
    ("linear_log_probs", "weight"): set(),
    ("linear_log_probs", "bias"): OPTIONAL,
    ("linear_log_probs", "extra_targets"): OPTIONAL | {"one element more"},
    ("linear_log_probs", "temperature"): POSITIVE,
    **{("linear_distillation", name): set() for name in ("weight", "teacher_hidden", "teacher_weight")},
    **{("linear_distillation", name): POSITIVE for name in ("temperature", "soft_weight", "hard_weight")},
    ("linear_distillation", "teacher_logit_scale"): NUMBER,
    ("add_rms_norm", "x"): FLOAT,
    ("gated_rms_norm", "x"): FLOAT,
    **{
        (op, name): values
        for op in ("gated_delta_rule", "kda")
        for name, values in {
            "q": set(),
            # A head of v with one feature more.
            "v": {"one element more"},
            "beta": FLOAT,
            "g": FLOAT,
            "scale": NUMBER | OPTIONAL,
            "initial_state": OPTIONAL,
            "cu_seqlens": OPTIONAL,
        }.items()
    },
    **{("ssd", name): FLOAT for name in ("dt", "A")},
    **{("ssd", name): FLOAT | OPTIONAL for name in ("D", "dt_bias")},
    # A head of x with one feature more.
    ("ssd", "x"): {"one element more"},
    **{("ssd", name): OPTIONAL for name in ("z", "initial_states", "cu_seqlens")},
    ("ssd", "chunk_size"): {"int", "None"},
    ("ssd", "dt_limit"): set(),
    ("glu_mlp", "gate_scale"): NUMBER,
    ("glu_mlp", "output_scale"): NUMBER,
    ("glu_mlp", "limit"): POSITIVE | OPTIONAL,
    ("gated_rms_norm", "gate"): FLOAT,
    ("gated_rms_norm", "group_size"): {"int", "None"},
    ("moe_mlp", "x"): FLOAT,
    ("causal_conv1d", "x"): FLOAT,
    # A kernel of one tap more, and one sample more that is empty.
    ("causal_conv1d", "weight"): FLOAT | {"one element more"},
    ("causal_conv1d", "cu_seqlens"): OPTIONAL | {"one element more"},
    ("lora_moe_mlp", "x"): FLOAT,
    ("load_balancing_loss", "router_logits"): FLOAT | {"one dimension more"},
    ("load_balancing_loss", "num_experts"): set(),
    ("load_balancing_loss", "top_k"): {"int"},
    # The mask holds one number for each token, in any shape and of any dtype.
    ("load_balancing_loss", "attention_mask"): FLOAT
    | OPTIONAL
    | {"bool", "int16", "fp8", "one dimension more"},
    ("lora_moe_mlp", "transposed"): {"False"},
    **{("lora_moe_mlp", name): NUMBER for name in ("up_scaling", "down_scaling")},
    ("lora_linear", "bias"): OPTIONAL,
    # 8 features are no multiple of 16.
    ("fp8_linear", "x"): LEADING - {"tensor of 5 dimensions"},
    ("fp8_linear", "bias"): OPTIONAL,
    ("fp8_linear", "weight"): set(),
    ("lora_linear", "weight"): set(),
    ("moe_mlp", "transposed"): {"False"},
    ("rope", "k"): OPTIONAL | FLOAT,
    ("rope", "dtype"): OPTIONAL | {"torch.float32", "torch.float16"},
    ("qk_norm_rope", "k"): FLOAT,
    # Counting the valid rows needs a tensor with values, of any shape.
    ("ValidRows", "target"): {"scalar of int", "one dimension more", "one dimension less", "one element more"},
}  # fmt: skip


def _calls() -> dict[str, tuple[str, Callable, dict[str, object], list[str]]]:
    """Return for each test id the op, the call, arguments that work, and the parameters that the signature hides."""
    calls = {}
    for name, arguments in FUNCTIONS.items():
        calls[name] = name, getattr(tigon, name), arguments, HIDDEN.get(name, "").split()
    for name, (settings, arguments, hidden) in MODULES.items():
        kind = getattr(tigon, name)
        factory = {"device": DEVICE} if "device" in hidden else {}

        def construct_and_call(kind=kind, arguments=arguments, factory=factory, **settings) -> object:
            return kind(**factory | settings)(**arguments)

        construct_and_call.__signature__ = inspect.signature(kind)
        calls[f"{name}(...)"] = name, construct_and_call, settings, hidden.split()
        calls[f"{name}(...).forward"] = name, kind(**settings, **factory).forward, arguments, []
    return calls


CALLS = _calls()
every_call = pytest.mark.parametrize(("op", "run", "arguments", "hidden"), CALLS.values(), ids=CALLS)


def _accepted_by_type(parameter: inspect.Parameter | None) -> set[str]:
    """Return the values that a parameter takes by its annotation; none if the signature hides it."""
    annotation = None if parameter is None else parameter.annotation
    types = get_args(annotation) or (annotation,)
    return {value for kind in types if isinstance(kind, type) for value in ACCEPTED_BY_TYPE.get(kind, ())}


def _accepted(op: str, run: Callable, name: str) -> set[str]:
    """Return the values that an argument of an op is documented to take."""
    for table, key in ((ACCEPTED_BY_OP, (op, name)), (ACCEPTED, name)):
        if key in table:
            return table[key]
    return _accepted_by_type(inspect.signature(run, eval_str=True).parameters.get(name))


def _tensors(arguments: dict[str, object]) -> list[Tensor]:
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    return tensors + [x.grad for x in tensors if x.grad is not None]


def _fresh(arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments with copies of the tensors, because a call that works may write to them on request."""

    def copy(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        duplicate = x.detach().clone().requires_grad_(x.requires_grad)
        duplicate.grad = None if x.grad is None else x.grad.clone()
        return duplicate

    return {name: copy(x) for name, x in arguments.items()}


def _attempts(run: Callable, arguments: dict[str, object], hidden: list[str]) -> list[tuple[str, str, object]]:
    """Return the attempts: each is a parameter, the name of a value, and the value."""
    parameters = inspect.signature(run).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] + hidden
    attempts = [(name, kind, value) for name in names for kind, value in VALUES.items()]
    for name in names:
        if isinstance(arguments.get(name), Tensor):
            attempts += [(name, kind, change(arguments[name].detach())) for kind, change in CHANGES.items()]
    return attempts


# torch warns of deprecated arguments, and of a loss that has no backward pass.
@pytest.mark.filterwarnings("ignore")
@every_call
def test_an_argument_is_documented_or_refused(op, run, arguments, hidden):
    beginnings = tuple(f"{name}: " for name in (op, COMPUTED_BY.get(op)) if name)
    problems = []
    for parameter, kind, value in _attempts(run, arguments, hidden):
        documented = kind in _accepted(op, run, parameter)
        copies, argument = _fresh(arguments), f"{parameter}={kind}"
        versions = [x._version for x in _tensors(copies)]
        try:
            run(**copies | {parameter: value})
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if documented:
                problems.append(f"{argument} is documented, but got {message}")
            elif not isinstance(error, (TypeError, ValueError)) or not str(error).startswith(beginnings):
                problems.append(f"{argument} is not refused in the name of {op}: {message}")
            elif len(message) > 400:
                problems.append(f"{argument} has a message of {len(message)} characters")
            if [x._version for x in _tensors(copies)] != versions:
                problems.append(f"{argument} wrote to an argument before it was refused")
        else:
            if not documented:
                problems.append(f"{argument} is accepted")
    assert not problems, "\n".join([f"{len(problems)} arguments of {op}:", *problems])


def test_every_public_name_is_tested():
    assert set(FUNCTIONS) | set(MODULES) | TESTED_IN_OTHER_FILES == set(tigon.__all__)
