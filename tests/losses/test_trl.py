"""The losses and their metrics are those of TRL 1.16, whose own methods run here on an object in place of a trainer."""

import inspect
import itertools
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from losses.cases import Tokens, tokens
from tigon import losses
from tigon.losses.policy import GRPO_LOSSES
from tigon.losses.preference import DPO_LOSSES

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")
pytest.importorskip("trl", reason="TRL is not installed")


class _Accelerator:
    """An accelerator of one process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x

    gather_for_metrics = unwrap_model = gather

    def reduce(self, x, reduction):
        return x

    def pad_across_processes(self, x, dim, pad_index):
        return x


class _Model(nn.Module):
    """A model whose forward returns what a test gives it."""

    is_gradient_checkpointing = False

    def __init__(self, **outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, **kwargs):
        return SimpleNamespace(**self.outputs)


def _trainer(**settings):
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(
        accelerator=_Accelerator(), aux_loss_enabled=False, _metrics=metrics, _total_train_tokens=0, _tp_size=1,
        **settings,
    )  # fmt: skip


def _inputs(x: Tokens) -> dict[str, Tensor]:
    """Return a batch of TRL: the first token of each row predicts nothing."""
    shape = len(x.mask), x.mask.shape[1] + 1
    first = torch.zeros(shape[0], 1, dtype=torch.int64)
    return {
        "input_ids": torch.ones(shape, dtype=torch.int64), "attention_mask": torch.ones(shape, dtype=torch.int64),
        "completion_mask": torch.cat((first, x.mask.long()), 1),
    }  # fmt: skip


def _assert_same(
    result, log_probs: Tensor, expected: Tensor, expected_log_probs: Tensor, metrics, tolerance=2e-5
) -> None:
    """Compare a loss, its gradient and its metrics with those of TRL."""
    loss, own_metrics = result
    torch.testing.assert_close(loss, expected.reshape(()), rtol=tolerance, atol=1e-6)
    (own_grad,) = torch.autograd.grad(loss, log_probs)
    (grad,) = torch.autograd.grad(expected.reshape(()), expected_log_probs)
    torch.testing.assert_close(own_grad, grad, rtol=tolerance, atol=1e-7)
    compared = 0
    for name, values in metrics.items():
        if name in own_metrics:
            compared += 1
            own = own_metrics[name].item()
            assert own == pytest.approx(values[-1], rel=tolerance, abs=1e-6, nan_ok=True), name
            assert not own_metrics[name].requires_grad
    assert compared or not metrics


TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
SMOOTHED = {"exo_pair": 0.1, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.3}
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
DIVERGING = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm")


def test_every_type_is_compared():
    assert set(TYPES) == set(DPO_LOSSES)
    # GSPO is no type of TRL.
    assert {*GRPO_TYPES, "gspo"} == set(GRPO_LOSSES)


def _dpo_cases():
    for name in TYPES:
        yield {"loss_type": [name]}
        yield {"loss_type": [name], "beta": 0.7, "ld_alpha": 0.3}
        yield {"loss_type": [name], "precomputed": True}
        # TRL multiplies the losses in place, which autograd refuses for hinge, and torch for sft.
        if name not in ("aot", "aot_unpaired", "hinge", "sft"):
            yield {"loss_type": [name], "use_weighting": True}
        if name in SMOOTHED:
            yield {"loss_type": [name], "label_smoothing": 0.45}
        if name in DIVERGING:
            for divergence in DIVERGENCES:
                yield {"loss_type": [name], "f_divergence_type": divergence}
    yield {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}
    yield {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.5}
    yield {"loss_type": ["discopop"], "discopop_tau": 0.5}
    yield {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    yield {"loss_type": ["sigmoid", "ipo"], "ld_alpha": 0.0}
    yield {"loss_type": ["hinge"], "ld_alpha": 1.0}


def _name(case: dict) -> str:
    return "-".join("+".join(map(str, x)) if isinstance(x, list) else f"{k}={x}" for k, x in case.items())


@pytest.mark.parametrize("case", list(_dpo_cases()), ids=_name)
@pytest.mark.sampled(2)
def test_dpo(case):
    from trl.trainer.dpo_trainer import DPOTrainer

    options = {"label_smoothing": SMOOTHED.get(case["loss_type"][0], 0.0)} | case
    precomputed = options.pop("precomputed", False)
    x = tokens(6, 9, empty=(2,) if options["loss_type"] != ["sft"] else ())
    policy, reference = x.log_probs(), x.log_probs("reference")
    squares = x.normal("squares", 0.5, -1.5)
    outputs = {
        "entropy": x.normal("entropy").abs(), "mean_logits": x.normal("logits"), "is_top1": x.normal("top") > 0,
        "log_sum_sq_probs": squares,
    }  # fmt: skip
    expected_log_probs, log_probs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    defaults = {
        "loss_weights": None, "beta": 0.1, "ld_alpha": None, "use_weighting": False, "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5, "discopop_tau": 0.05,
    }  # fmt: skip
    settings = defaults | options
    settings["loss_types"] = settings.pop("loss_type")
    settings["loss_weights"] = settings["loss_weights"] or [1.0] * len(settings["loss_types"])
    args = SimpleNamespace(discopop_tau=settings.pop("discopop_tau"), gradient_checkpointing_kwargs=None)
    model = _Model(log_probs=torch.where(x.mask, expected_log_probs, 0.0), **outputs)
    trainer = _trainer(
        model=model, args=args, precompute_ref_logps=precomputed, ref_model=_Model(log_probs=reference), **settings
    )
    inputs = _inputs(x)
    own = {"ref_log_probs": reference}
    if precomputed:
        sums = reference.sum(-1)
        inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = sums.chunk(2)
        own = {"ref_sequence_log_probs": sums}
    expected = DPOTrainer._compute_loss(trainer, model, inputs, False)

    if options.get("use_weighting"):
        own["log_sum_sq_probs"] = squares
    result = losses.dpo_loss(log_probs, x.mask, **own, **options)
    outputs.pop("log_sum_sq_probs")
    shown = losses.preference_token_metrics(x.mask, **outputs)
    assert len(shown) == 4
    _assert_same(
        (result[0], result[1] | shown), log_probs, expected, expected_log_probs,
        {name: values for name, values in trainer._metrics["train"].items() if name != "num_tokens"},
    )  # fmt: skip
    assert set(trainer._metrics["train"]) - {"num_tokens"} == set(result[1] | shown)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("labels", [[1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("shift", [-0.5, 0.5], ids=["negative KL", "positive KL"])
def test_kto(loss_type, labels, shift):
    from trl.trainer.kto_trainer import KTOTrainer

    x = tokens(5, 7, empty=(1,))
    policy, reference = x.log_probs(), x.log_probs("reference")
    expected_log_probs, log_probs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    kl_policy, kl_reference = x.log_probs("kl"), x.log_probs("kl reference") - shift * x.mask
    shown = {"entropy": x.normal("entropy").abs(), "mean_logits": x.normal("logits")}
    model = _Model(log_probs=torch.where(x.mask, expected_log_probs, 0.0), **shown)
    trainer = _trainer(
        model=model, args=SimpleNamespace(gradient_checkpointing_kwargs=None), precompute_ref_logps=False,
        ref_model=_Model(log_probs=reference), calculate_KL=loss_type == "kto", beta=0.4, loss_type=loss_type,
        desirable_weight=1.3, undesirable_weight=0.6,
    )  # fmt: skip
    divergences = iter((kl_policy.sum(-1), kl_reference.sum(-1)))
    trainer._compute_kl_logps = lambda *_: next(divergences)
    is_desirable = torch.tensor(labels).bool()
    expected = KTOTrainer._compute_loss(trainer, model, _inputs(x) | {"label": is_desirable}, False)

    kl = losses.kto_kl(kl_policy, x.mask, kl_reference) if loss_type == "kto" else None
    loss, metrics = losses.kto_loss(
        log_probs, x.mask, is_desirable, reference, kl, beta=0.4, loss_type=loss_type, desirable_weight=1.3,
        undesirable_weight=0.6,
    )  # fmt: skip
    metrics |= losses.preference_token_metrics(x.mask, is_chosen=is_desirable, **shown)
    trl_metrics = trainer._metrics["train"]
    _assert_same((loss, metrics), log_probs, expected, expected_log_probs, trl_metrics)
    assert set(trl_metrics) - {"num_tokens"} <= set(metrics)


def _logits_of(log_probs: Tensor) -> Tensor:
    """Return logits over two tokens such that the token 0 has these log-probabilities, after one more position."""
    other = torch.log(-torch.expm1(log_probs.double().clamp(max=-1e-6))).float()
    logits = torch.stack((log_probs.clamp(max=-1e-6), other), -1)
    return torch.cat((logits, logits[:, :1]), 1)


def _reference_free_model(x: Tokens, expected_log_probs: Tensor):
    """Return a model and the batch for the `concatenated_forward` of CPO."""
    logits = _logits_of(expected_log_probs)
    labels = torch.full((len(x.mask), x.mask.shape[1] + 1), -100)
    labels[:, 1:][x.mask] = 0
    batch = {}
    for name, rows in (("chosen", slice(0, len(labels) // 2)), ("rejected", slice(len(labels) // 2, None))):
        batch[f"{name}_labels"] = labels[rows]
        batch[f"{name}_input_ids"] = torch.zeros_like(labels[rows])
        batch[f"{name}_attention_mask"] = torch.cat((torch.ones(len(labels[rows]), 1), x.mask[rows]), 1).long()
    return lambda *_, **__: SimpleNamespace(logits=logits), batch


def _bind(trainer, trainer_class, *names):
    for name in names:
        function = inspect.getattr_static(trainer_class, name)
        bound = function.__func__ if isinstance(function, staticmethod) else function.__get__(trainer)
        setattr(trainer, name, bound)
    return trainer


REFERENCE_FREE = ("concatenated_inputs", "get_batch_logps", "concatenated_forward", "get_batch_loss_metrics")


@pytest.mark.parametrize("case", [
    {"loss_type": "sigmoid"}, {"loss_type": "hinge", "beta": 0.9}, {"loss_type": "ipo", "cpo_alpha": 0.0},
    {"loss_type": "simpo", "simpo_gamma": 0.8, "cpo_alpha": 0.3}, {"loss_type": "sigmoid", "label_smoothing": 0.2},
    {"loss_type": "simpo", "label_smoothing": 0.1}, {"loss_type": "simpo", "alpha": 0.4},
    {"loss_type": "sigmoid", "alpha": 0.05}, {"loss_type": "hinge", "alpha": -0.1},
    {"loss_type": "ipo", "alpha": 0.2},
], ids=_name)  # fmt: skip
def test_cpo(case):
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    x = tokens(6, 5)
    policy = x.log_probs()
    expected_log_probs, log_probs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    defaults = {"beta": 0.1, "cpo_alpha": 1.0, "label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0}
    trainer = _trainer(is_encoder_decoder=False, pad_token_id=0, **(defaults | case))
    model, batch = _reference_free_model(x, expected_log_probs)
    _bind(trainer, CPOTrainer, "cpo_loss", *REFERENCE_FREE)
    expected, metrics = trainer.get_batch_loss_metrics(model, batch)
    own = losses.cpo_loss(log_probs, x.mask, **case)
    if case.get("cpo_alpha") == 0:
        metrics.pop("nll_loss")
    compared = {name: [value] for name, value in metrics.items() if not name.startswith("logits")}
    _assert_same(own, log_probs, expected, expected_log_probs, compared, 1e-4)
    assert set(compared) <= set(own[1])


GRPO_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
GRPO_DEFAULTS = {
    "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.0,
    "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "entropy_coef": 0.0,
    "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
}  # fmt: skip


def _grpo_cases():
    for name, level in itertools.product(GRPO_TYPES, ("token", "sequence")):
        base = {"loss_type": name, "importance_sampling_level": level}
        if name == "cispo":
            base["epsilon_high"] = 1.5
        yield base
        yield base | {"beta": 0.3, "importance": "token"}
        if name != "vespo":
            yield base | {"beta": 0.3, "use_bias_correction_kl": False, "importance": "sequence"}
        yield base | {"entropy_coef": 0.2, "top_entropy_quantile": 0.3, "off_policy_mask_threshold": 0.01}
        yield base | {"per_token": True, "off_policy_mask_threshold": 0.01}
        yield base | {"on_policy": True}
    for name in ("grpo", "dapo", "luspo"):
        base = {"loss_type": name, "importance_sampling_level": "token"}
        yield base | {"delta": 1.1, "epsilon_high": 0.28}
        yield base | {"delta": 1.6, "epsilon": 0.1, "epsilon_high": 0.3}
    yield {"loss_type": "dapo", "top_entropy_quantile": 0.0}
    yield {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.7}
    yield {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.3, "vespo_lambda_neg": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("case", list(_grpo_cases()), ids=_name)
@pytest.mark.sampled(2)
def test_grpo(case):
    from trl.trainer.grpo_trainer import GRPOTrainer

    options = dict(case)
    importance, per_token = options.pop("importance", None), options.pop("per_token", False)
    on_policy = options.pop("on_policy", False)
    settings = GRPO_DEFAULTS | options
    x = tokens(6, 9, empty=(2,))
    expected_log_probs, log_probs = (x.log_probs().clone().requires_grad_() for _ in range(2))
    expected_entropy, entropy = (x.normal("entropy").abs().clone().requires_grad_() for _ in range(2))
    advantages = x.normal("advantages") if per_token else x.per_sequence("advantages")
    own = {"old_log_probs": None if on_policy else x.log_probs("old", 0.3), "ref_log_probs": x.log_probs("reference")}
    if importance:
        own["importance_sampling_ratio"] = (
            x.per_sequence("ratios").abs() if importance == "sequence" else x.normal("ratios", 0.3).exp()
        )
    if settings["off_policy_mask_threshold"] and not on_policy and not per_token:
        own["sampling_log_probs"] = torch.where(x.normal("unknown") > 1, math.nan, x.log_probs("sampling", 0.4))

    inputs = {
        "prompt_ids": torch.ones(6, 1), "prompt_mask": torch.ones(6, 1), "completion_ids": torch.ones(6, 9),
        "completion_mask": x.mask.long(), "advantages": advantages, "num_items_in_batch": torch.tensor(50.0),
        "ref_per_token_logps": own["ref_log_probs"], "old_per_token_logps": own["old_log_probs"],
    }  # fmt: skip
    if "sampling_log_probs" in own:
        inputs["sampling_per_token_logps"] = own["sampling_log_probs"]
    if importance:
        ratios = own["importance_sampling_ratio"]
        inputs["importance_sampling_ratio"] = ratios[:, None] if importance == "sequence" else ratios
    model = SimpleNamespace(training=True)
    trainer = _trainer(
        model=model, args=SimpleNamespace(**settings, steps_per_generation=1), use_vllm=importance is not None,
        vllm_importance_sampling_correction=True, max_completion_length=13, current_gradient_accumulation_steps=1,
        epsilon_low=settings["epsilon"], use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        **{name: value for name, value in settings.items() if name != "epsilon"},
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (expected_log_probs, expected_entropy, None)
    _bind(trainer, GRPOTrainer, "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights")
    expected = GRPOTrainer._compute_loss(trainer, model, inputs)

    if settings["loss_type"] == "dr_grpo":
        own["max_completion_length"] = 13
    if settings["loss_type"] in ("dapo", "cispo", "vespo"):
        own["num_items_in_batch"] = torch.tensor(50.0)
    result = losses.grpo_loss(log_probs, advantages, x.mask, entropy=entropy, **own, **options)
    _assert_same(result, log_probs, expected, expected_log_probs, trainer._metrics["train"] | {"loss": [0]})
    assert set(trainer._metrics["train"]) - {"entropy_coef"} <= set(result[1])
    if settings["entropy_coef"]:
        grads = torch.autograd.grad(
            losses.grpo_loss(log_probs, advantages, x.mask, entropy=entropy, **own, **options)[0], entropy
        )
        expected = GRPOTrainer._compute_loss(trainer, model, inputs)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, expected_entropy))


@pytest.mark.parametrize("old", [False, True])
def test_rloo(old):
    from trl.trainer.rloo_trainer import RLOOTrainer

    x = tokens(6, 9, empty=(2,))
    policy = x.log_probs()
    expected_log_probs, log_probs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    old_log_probs = x.log_probs("old", 0.05) + 0.7 * x.normal("policy") if old else policy
    entropy, advantages = x.normal("entropy").abs(), x.per_sequence("advantages")
    inputs = {
        "prompt_ids": torch.ones(6, 1), "prompt_mask": torch.ones(6, 1), "completion_ids": torch.ones(6, 9),
        "completion_mask": x.mask.long(), "advantages": advantages, "old_logps": old_log_probs.sum(-1),
    }  # fmt: skip
    trainer = _trainer(model=SimpleNamespace(training=True), epsilon_low=0.1, epsilon_high=0.3)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (expected_log_probs, entropy, None)
    expected = RLOOTrainer._compute_loss(trainer, trainer.model, inputs)
    own = losses.rloo_loss(
        log_probs, advantages, x.mask, old_log_probs if old else None, epsilon=0.1, epsilon_high=0.3, entropy=entropy
    )
    _assert_same(own, log_probs, expected, expected_log_probs, trainer._metrics["train"])
    assert set(trainer._metrics["train"]) <= set(own[1])
