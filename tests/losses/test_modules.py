"""The modules of losses compute what their functions compute from all log-probabilities, in as few products as said."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tigon
from op_cases import one_in
from tigon import losses
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_log_probs import linear_log_probs_reference
from tigon.runtime.tuning import tuned

HIDDEN, VOCABULARY, SEQUENCES, LENGTH = 12, 37, 6, 7
# A part has one pair or two sequences.
PART_TOKENS = 2 * LENGTH


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    hidden = values(SEQUENCES, LENGTH, HIDDEN, seed=0).requires_grad_()
    weight = values(VOCABULARY, HIDDEN, seed=1).mul_(0.3).requires_grad_()
    targets = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(2))
    if ignored:
        targets[0, 4:] = targets[2, :2] = targets[5] = -100
    return hidden, weight, targets


OLD, REFERENCE = (values(SEQUENCES, LENGTH, seed=seed) * 0.2 - 3.6 for seed in (3, 4))
ADVANTAGES, PER_TOKEN = values(SEQUENCES, seed=5), values(SEQUENCES, LENGTH, seed=6)
COMPLETIONS = torch.arange(LENGTH) >= torch.tensor([1, 3, 2, 1, 2, 3])[:, None]
LABELS = torch.tensor([True, False, True, True, False, False])

# For each module: the options, the tensors of a call by name, and the number of products if no token is ignored.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "dpo": ("DPOLoss", {"beta": 0.3}, {"ref_log_probs": REFERENCE}, 3),
    "dpo, several types": (
        "DPOLoss", {"loss_type": ["ipo", "apo_zero"], "loss_weights": [0.5, 2.0]}, {"ref_log_probs": REFERENCE}, 3,
    ),
    "dpo, sums of the reference": ("DPOLoss", {}, {"ref_sequence_log_probs": REFERENCE.sum(-1)}, 3),
    "dpo, sorted": ("DPOLoss", {"loss_type": "aot"}, {"ref_log_probs": REFERENCE}, 4),
    "dpo, weighted": ("DPOLoss", {"use_weighting": True}, {"ref_log_probs": REFERENCE}, 3),
    "dpo, with sft": ("DPOLoss", {"loss_type": ["sigmoid", "sft"]}, {"ref_log_probs": REFERENCE}, 3),
    "dpo, sft with weights": (
        "DPOLoss", {"loss_type": ["sigmoid", "sft"], "use_weighting": True}, {"ref_log_probs": REFERENCE}, 4,
    ),
    "orpo": ("ORPOLoss", {}, {}, 3),
    "orpo with tokens of prompts": ("ORPOLoss", {}, {"mask": COMPLETIONS, "nll_mask": COMPLETIONS.roll(2, 1)}, 3),
    "cpo": ("CPOLoss", {}, {}, 3),
    "cpo without nll": ("CPOLoss", {"cpo_alpha": 0.0, "loss_type": "simpo"}, {}, 3),
    "simpo": ("SimPOLoss", {"gamma": 0.7}, {}, 3),
    "kto": (
        "KTOLoss", {"beta": 0.4}, {"is_desirable": LABELS, "ref_log_probs": REFERENCE, "kl": torch.tensor(0.2)}, 3,
    ),
    "ppo": ("PPOLoss", {}, {"advantages": PER_TOKEN, "old_log_probs": OLD}, 3),
    "rloo": ("RLOOLoss", {}, {"advantages": ADVANTAGES, "old_log_probs": OLD}, 3),
    "rloo, entropy": ("RLOOLoss", {"entropy_coef": 0.1}, {"advantages": ADVANTAGES, "old_log_probs": OLD}, 3),
    "dr_grpo": (
        "GRPOLoss", {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"advantages": ADVANTAGES, "old_log_probs": OLD}, 3,
    ),
    "grpo with a divisor": (
        "GRPOLoss", {"loss_type": "dapo"},
        {"advantages": ADVANTAGES, "old_log_probs": OLD, "num_items_in_batch": torch.tensor(50.0)}, 3,
    ),
    "grpo with the largest entropies": (
        "GRPOLoss", {"loss_type": "grpo", "top_entropy_quantile": 0.5}, {"advantages": ADVANTAGES}, 4,
    ),
    "grpo with a threshold of the entropy": (
        "GRPOLoss", {"loss_type": "grpo", "top_entropy_quantile": 0.5},
        {"advantages": ADVANTAGES, "top_entropy_threshold": torch.tensor(3.3)}, 3,
    ),
    **{
        f"grpo, {name}": (
            "GRPOLoss", {"loss_type": name, "beta": 0.1} | ({"epsilon_high": 5.0} if name == "cispo" else {}),
            {"advantages": ADVANTAGES, "old_log_probs": OLD, "ref_log_probs": REFERENCE}, 3,
        )
        for name in ("grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gspo")
    },
}  # fmt: skip


def expected_loss(name: str, options: dict, tensors: dict, hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
    """Call the function of a module with all log-probabilities."""
    function = getattr(losses, f"{name.removesuffix('Loss').lower()}_loss")
    result = linear_log_probs_reference(
        hidden, weight, targets, return_entropy=True, return_sum_sq_probs=True, temperature=0.9
    )
    extra = {}
    if options.get("use_weighting"):
        extra["log_sum_sq_probs"] = result.log_sum_sq_probs
    if options.get("entropy_coef") or options.get("top_entropy_quantile"):
        extra["entropy"] = result.entropy
    mask = targets != -100
    masks = {name: tensors[name] & mask for name in ("mask", "nll_mask") if name in tensors}
    return function(result.log_probs, **{"mask": mask} | tensors | masks, **extra, **options)


@one_in(3, case=CASES, ignored={"all tokens": False, "ignored tokens": True})
def test_a_module_computes_its_function(case, ignored):
    name, options, tensors, products = case
    hidden, weight, targets = make(ignored)
    with tuned(ChunkConfig, tokens=PART_TOKENS), FlopCounterMode(display=False) as counter:
        loss, metrics = getattr(tigon, name)(temperature=0.9, **options)(hidden, weight, targets, **tensors)
        # The counter of a module does not support `torch.autograd.grad`.
        loss.backward()
    actual = hidden.grad, weight.grad
    expected, expected_metrics = expected_loss(name, options, tensors, hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-5, equal_nan=True)
    gradients = torch.autograd.grad(expected, [hidden, weight])
    for value, reference in zip(actual, gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))
    if not ignored and "mask" not in tensors:
        assert counter.get_total_flops() == products * 2 * targets.numel() * HIDDEN * VOCABULARY


def test_a_reference_model_may_have_another_width_and_gets_no_gradient():
    hidden, weight, targets = make()
    ref_hidden = values(SEQUENCES, LENGTH, 5, seed=7).requires_grad_()
    ref_weight = values(VOCABULARY, 5, seed=8).requires_grad_()
    loss, _ = tigon.DPOLoss()(hidden, weight, targets, ref_hidden, ref_weight)
    loss.backward()
    assert ref_hidden.grad is None
    assert ref_weight.grad is None
    ref_log_probs = linear_log_probs_reference(ref_hidden, ref_weight, targets).detach()
    torch.testing.assert_close(loss, tigon.DPOLoss()(hidden, weight, targets, ref_log_probs=ref_log_probs)[0])


@one_in(
    2, name=["dpo, weighted", "dpo, sorted", "orpo", "simpo", "kto", "ppo", "grpo, dapo", "rloo"],
    ignored={"all tokens": False, "ignored tokens": True},
)  # fmt: skip
def test_packed_sequences_are_those_of_padded_rows(name, ignored):
    """There are as many products for packed sequences, of which one has no tokens, as for padded ones."""
    module, options, tensors, products = CASES[name]
    hidden, weight, targets = make(ignored)
    lengths = torch.tensor([3, 7, 0, 5, 7, 2])
    is_kept = torch.arange(LENGTH) < lengths[:, None]
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    pack = lambda x: x[is_kept] if x.shape == targets.shape else x
    loss_fn = getattr(tigon, module)(**options)
    padded, padded_metrics = loss_fn(hidden, weight, targets.masked_fill(~is_kept, -100), **tensors)
    expected = torch.autograd.grad(padded, [hidden, weight])
    packed_hidden = hidden.detach()[is_kept].requires_grad_()
    weight = weight.detach().requires_grad_()
    with tuned(ChunkConfig, tokens=10), FlopCounterMode(display=False) as counter:
        packed, packed_metrics = loss_fn(
            packed_hidden, weight, targets[is_kept], cu_seqlens=cu_seqlens,
            **{key: pack(value) for key, value in tensors.items()},
        )  # fmt: skip
        packed.backward()
    torch.testing.assert_close(packed, padded)
    torch.testing.assert_close(packed_metrics, padded_metrics, equal_nan=True)
    torch.testing.assert_close(packed_hidden.grad, expected[0][is_kept])
    torch.testing.assert_close(weight.grad, expected[1])
    if not ignored:
        # No part has as many tokens as the longest pair.
        is_pair = module in ("DPOLoss", "ORPOLoss", "SimPOLoss")
        assert counter.get_total_flops() == (4 if is_pair else products) * 2 * 24 * HIDDEN * VOCABULARY
        with tuned(ChunkConfig, tokens=14), FlopCounterMode(display=False) as counter:
            loss_fn(
                packed_hidden, weight, targets[is_kept], cu_seqlens=cu_seqlens,
                **{key: pack(value) for key, value in tensors.items()},
            )[0].backward()  # fmt: skip
        assert counter.get_total_flops() == products * 2 * 24 * HIDDEN * VOCABULARY


def test_bad_arguments_are_refused_before_any_product():
    """The function checks its arguments on tensors without values. The second call has the shapes of the first one."""
    hidden, weight, targets = make()
    module = tigon.GRPOLoss()
    with FlopCounterMode(display=False) as counter:
        for bad in ({"old_log_probs": OLD[:5]}, {"num_items_in_batch": torch.ones(2)}, {"ref_log_probs": OLD.double()}):
            with pytest.raises((TypeError, ValueError), match="grpo_loss: "):
                module(hidden, weight, targets, ADVANTAGES, **bad)
        with pytest.raises(ValueError, match="DPOLoss: ref_hidden must have shape"):
            tigon.DPOLoss()(hidden, weight, targets, hidden[:4], weight)
    assert counter.get_total_flops() == 0
    first, _ = module(hidden, weight, targets, ADVANTAGES)
    second, _ = module(hidden, weight, targets, 2 * ADVANTAGES)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda h, w, t: tigon.DPOLoss(betta=1.0), ValueError, "DPOLoss: an option must be"),
    (lambda h, w, t: tigon.DPOLoss()(h[:5], w, t[:5]), ValueError, "dpo_loss: log_probs must have an even"),
    (lambda h, w, t: tigon.DPOLoss()(h, w, t, h), ValueError, "DPOLoss: ref_weight must be a tensor"),
    (lambda h, w, t: tigon.DPOLoss()(h, w, t, None, w), ValueError, "DPOLoss: ref_hidden must be a tensor"),
    (lambda h, w, t: tigon.DPOLoss()(h, w, t, h, w, ref_log_probs=OLD), ValueError, "DPOLoss: only one of"),
    (lambda h, w, t: tigon.KTOLoss()(h, w, t, LABELS[:5]), ValueError, "kto_loss: is_desirable must have shape"),
    (lambda h, w, t: tigon.SimPOLoss()(h, w, t, mask=t), TypeError, "SimPOLoss: mask must be a bool tensor"),
    (lambda h, w, t: tigon.GRPOLoss(loss_type="x")(h, w, t, ADVANTAGES), ValueError, "grpo_loss: loss_type must"),
    (lambda h, w, t: tigon.PPOLoss()(h, w, t, ADVANTAGES, kl=OLD), ValueError, "PPOLoss: a tensor must be"),
    (lambda h, w, t: tigon.RLOOLoss()(h, w, t, ADVANTAGES[:3]), ValueError, "rloo_loss: advantages must have"),
])  # fmt: skip
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(*make())
