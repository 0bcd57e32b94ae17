"""One call of each loss and each of its options, for the tests that hold for all losses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from losses.cases import Tokens
from tigon import losses

# The arguments of a call: the tensor that gets the gradient is first.
Arguments = dict[str, Any]


@dataclass
class Call:
    """A loss and the function that makes its arguments from tokens."""

    name: str
    loss: Callable[..., Any]
    arguments: Callable[[Tokens], Arguments]
    # Part of the loss is a constant for autograd, so that the gradient is not the derivative of the value.
    stops_gradient: bool = False
    # The value and the gradient where no sequence has a token; None where they have another value than zero.
    zero_without_tokens: bool = False

    def __call__(self, arguments: Arguments) -> Any:
        return self.loss(**arguments)


def _call(loss: Callable[..., Any], name: str, arguments: Callable[[Tokens], Arguments], **facts: bool) -> Call:
    return Call(f"{loss.__name__}-{name}".rstrip("-"), loss, arguments, **facts)


def _base(x: Tokens) -> Arguments:
    return {"log_probs": x.log_probs(), "mask": x.mask}


def _dpo(**options: Any) -> Callable[[Tokens], Arguments]:
    return lambda x: _base(x) | {"ref_log_probs": x.log_probs("reference")} | options


def _plain(**options: Any) -> Callable[[Tokens], Arguments]:
    return lambda x: _base(x) | options


def _kto(x: Tokens) -> Arguments:
    is_desirable = torch.arange(len(x.mask)) % 3 == 0
    return _base(x) | {"is_desirable": is_desirable, "ref_log_probs": x.log_probs("reference"), "beta": 0.5}


def _policy(per_token: bool = False, **options: Any) -> Callable[[Tokens], Arguments]:
    def arguments(x: Tokens) -> Arguments:
        advantages = x.normal("advantages") if per_token else x.per_sequence("advantages")
        return _base(x) | {"advantages": advantages, "old_log_probs": x.log_probs("old", 0.3)} | options

    return arguments


def _grpo(**options: Any) -> Callable[[Tokens], Arguments]:
    policy = _policy(**options)
    return lambda x: policy(x) | {"ref_log_probs": x.log_probs("reference"), "entropy": x.normal("entropy").abs()}


SMOOTHED = {"exo_pair": 0.1, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.1}
DPO_TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "sigmoid_norm",
)  # fmt: skip
DPO_OPTIONS = {name: {"loss_type": name, "label_smoothing": SMOOTHED.get(name, 0.0)} for name in DPO_TYPES} | {
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.7},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence", "loss_type": "ipo"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence"},
    "forward_kl ipo": {"f_divergence_type": "forward_kl", "loss_type": "ipo"},
    "ld_alpha": {"ld_alpha": 0.4},
}
DPO_CALLS = [_call(losses.dpo_loss, name, _dpo(beta=0.5, **options)) for name, options in DPO_OPTIONS.items()]
DPO_CALLS += [
    _call(losses.dpo_loss, "sft", _dpo(loss_type="sft"), zero_without_tokens=True),
    _call(losses.dpo_loss, "no reference", _plain(beta=0.5)),
    _call(losses.dpo_loss, "several", _dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])),
    _call(
        losses.dpo_loss, "use_weighting",
        lambda x: _dpo(loss_type="hinge", use_weighting=True)(x) | {"log_sum_sq_probs": x.normal("squares", 0.3, -1.0)},
        stops_gradient=True,
    ),
]  # fmt: skip
OTHER_PREFERENCE_CALLS = [
    _call(losses.orpo_loss, "", _plain(beta=0.5)),
    _call(losses.orpo_loss, "nll_mask", lambda x: _base(x) | {"nll_mask": x.mask & (x.normal("nll") > -0.5)}),
    _call(losses.cpo_loss, "sigmoid", _plain(label_smoothing=0.1, beta=0.5)),
    _call(losses.cpo_loss, "hinge", _plain(loss_type="hinge", cpo_alpha=0.3)),
    _call(losses.cpo_loss, "ipo", _plain(loss_type="ipo", alpha=0.2)),
    _call(losses.cpo_loss, "simpo", _plain(loss_type="simpo", beta=0.5)),
    _call(losses.cpo_loss, "alphapo", _plain(loss_type="alphapo", alpha=0.2, beta=0.5)),
    _call(losses.simpo_loss, "", _plain()),
    _call(losses.kto_loss, "kto", lambda x: _kto(x) | {"kl": x.per_sequence("kl")[:1].sum().abs() + 0.1}),
    _call(losses.kto_loss, "apo_zero_unpaired", lambda x: _kto(x) | {"loss_type": "apo_zero_unpaired"}),
]
_ZERO = {"zero_without_tokens": True}
GRPO_OPTIONS: dict[str, Arguments] = {
    "grpo": {"loss_type": "grpo"}, "bnpo": {"loss_type": "bnpo", "epsilon_high": 0.4},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11, "delta": 1.3},
    "dapo": {"loss_type": "dapo", "num_items_in_batch": 17}, "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo", "per_token": True}, "luspo": {"loss_type": "luspo"}, "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "gspo", "per_token": True}, "k1": {"beta": 0.3, "kl_estimator": "k1"},
    "k2": {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k3": {"beta": 0.3, "loss_type": "gspo"}, "entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.4},
    "off-policy": {"off_policy_mask_threshold": 0.0},
}  # fmt: skip
POLICY_CALLS = [
    _call(losses.grpo_loss, name, _grpo(**options), stops_gradient=name in ("cispo", "vespo"), **_ZERO)
    for name, options in GRPO_OPTIONS.items()
]
POLICY_CALLS += [
    _call(losses.ppo_loss, "", _policy(per_token=True, epsilon=0.1, epsilon_high=0.3, delta=1.5), **_ZERO),
    _call(
        losses.ppo_value_loss, "",
        lambda x: {
            "values": x.normal("values"), "returns": x.normal("returns"), "mask": x.mask,
            "old_values": x.normal("values") + x.normal("old values", 0.3),
        },
        **_ZERO,
    ),
    _call(losses.rloo_loss, "", _policy(epsilon=0.5)),
    _call(
        losses.grpo_loss, "sampling ratio",
        lambda x: _grpo(loss_type="grpo")(x) | {"importance_sampling_ratio": x.per_sequence("ratios").abs()}, **_ZERO,
    ),
    _call(
        losses.grpo_loss, "sampling ratio of tokens",
        lambda x: _grpo(loss_type="gspo")(x) | {"importance_sampling_ratio": x.normal("ratios").abs()}, **_ZERO,
    ),
]  # fmt: skip
CALLS = [*DPO_CALLS, *OTHER_PREFERENCE_CALLS, *POLICY_CALLS]
