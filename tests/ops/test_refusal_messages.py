"""The message of a refusal names the op, the rule and the value."""

import numpy as np
import pytest
import torch

import tigon
from op_cases import DEVICE
from ops.test_refusals import LINEAR, LOGITS, MLP, MOE, ROPE, TARGET, X, _parameter, _randn

pytestmark = pytest.mark.no_interpreter("Every check precedes the choice of a kernel.")


MESSAGES = {
    "no tensor": (lambda: tigon.jsd(LOGITS, None), "jsd: target must be a Tensor, got NoneType"),
    "a flag that is a string": (
        lambda: tigon.tvd(LOGITS, LOGITS, from_logits="no"), "tvd: from_logits must be a bool, got 'no'",
    ),
    "a flag that is a tensor, whose value would need a synchronisation": (
        lambda: tigon.cross_entropy(LOGITS, TARGET, return_entropy=torch.tensor(False, device=DEVICE)),
        "cross_entropy: return_entropy must be a bool, got a Tensor of shape ()",
    ),
    "a choice that only equals one": (
        lambda: tigon.rope(**ROPE, unsqueeze_dim=True), "rope: unsqueeze_dim must be one of 1, 2, got True",
    ),
    "a number that fp32 does not have": (
        lambda: tigon.rms_norm(X, None, eps=1e40),
        "rms_norm: eps must be finite in float32 and not negative, got 1e+40",
    ),
    "a number that fp32 has as zero": (
        lambda: tigon.kl_div(LOGITS, LOGITS, from_logits=True, temperature=1e-60),
        "kl_div: temperature must be positive and finite, got 1e-60",
    ),
    "a number that Python does not print": (
        lambda: tigon.softmax(X, 10**5000), "softmax: dim must be in [-2, 1], got an int of 16610 bits",
    ),
    "a long value": (
        lambda: tigon.rope(**ROPE, sections=[7] * 1000), "rope: cos must have shape (3, 1 or 2, 5, R), got (1, 5, 8)",
    ),
    "logits of another number of experts": (
        lambda: tigon.load_balancing_loss((LOGITS, LOGITS[:, :7]), 8, 2),
        "load_balancing_loss: router_logits[1] must have shape (4, 8), got (4, 7)",
    ),
    "more experts of a token than there are": (
        lambda: tigon.load_balancing_loss((LOGITS,), 8, 9),
        "load_balancing_loss: top_k must be at most num_experts, which is 8, got 9",
    ),
    "an activation of another shape": (
        lambda: tigon.moe_mlp(**MOE, activation=lambda h: h),
        "moe_mlp: the result of activation must have shape (8, 4), got (8, 8)",
    ),
    "an activation that returns nothing": (
        lambda: tigon.moe_mlp(**MOE, activation=lambda h: None),
        "moe_mlp: the result of activation must be a Tensor, got NoneType",
    ),
    "an input of another dtype than the weights": (
        lambda: tigon.SwiGLUMLP(8, 6, device=DEVICE)(X.half()),
        "SwiGLUMLP: x and weight must have the same dtype, got x torch.float16, weight torch.float32",
    ),
    "items without a mean": (
        lambda: tigon.cross_entropy(LOGITS, TARGET, num_items=3, reduction="sum"),
        "cross_entropy: num_items needs reduction='mean', because it divides the sum, got 'sum'",
    ),
    "an empty vocabulary": (
        lambda: tigon.cross_entropy(LOGITS[:, :0], TARGET),
        "cross_entropy: input must have shape (..., V) with V > 0, got (4, 0)",
    ),
    "a temperature of probabilities": (
        lambda: tigon.kl_div(LOGITS, LOGITS, temperature=2.0),
        "kl_div: temperature must be 1 without from_logits=True, got 2; from_logits=True also accepts "
        "log-probabilities",
    ),
    "a vocabulary that is not sharded": (
        lambda: tigon.linear_log_probs(X, LINEAR["linear_weight"], TARGET, vocab_size=7),
        "linear_log_probs: vocab_size needs a process_group over which the vocabulary is sharded, got None",
    ),
    "packed gate and up of an odd width": (
        lambda: tigon.swiglu(X[:, :7]), "swiglu: packed gate and up must have an even last dimension, got shape (4, 7)",
    ),
    "experts of another width": (
        lambda: tigon.moe_mlp(**MOE | {"down_proj": MOE["down_proj"].mT}),
        "moe_mlp: down_proj must have shape (3, 8, 4), got (3, 4, 8)",
    ),
    "a size that the FP8 units do not take": (
        lambda: tigon.fp8_linear(torch.ones(4, 24), torch.ones(32, 24)),
        "fp8_linear: both sizes of weight must be positive multiples of 16, got (32, 24)",
    ),
    "a weight of other features": (
        lambda: tigon.glu_mlp(**MLP | {"gate_weight": _randn(6, 7)}),
        "glu_mlp: gate_weight must have shape [I, H] with H of x (4, 8), got (6, 7)",
    ),
    "an option of a group of parameters": (
        lambda: tigon.AdamW([{"params": [_parameter(3)], "lr": "fast"}]), "AdamW: lr must be a number, got 'fast'",
    ),
    "a value that torch refuses": (lambda: tigon.AdamW([_parameter(3)], lr=-1.0), "AdamW: Invalid learning rate: -1.0"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_names_the_op_the_rule_and_the_value(call, message):
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value) == message


GROUPS = {
    "vocab_size that is a string": ({"vocab_size": "10"}, "vocab_size must be an int, got '10'"),
    "vocab_size that is a bool": ({"vocab_size": True}, "vocab_size must be an int, got True"),
    "vocab_size of nothing": ({"vocab_size": 0}, "vocab_size must be positive and fit into 64 bits, got 0"),
    "no vocab_size": ({}, "vocab_size must be the number of rows on all ranks of process_group, got None"),
    "a number for a group": ({"process_group": 3}, "process_group must be a torch.distributed.ProcessGroup, got int"),
    "an array for a group": (
        {"process_group": np.ones(2)}, "process_group must be a torch.distributed.ProcessGroup, got ndarray",
    ),
    "the group of other ranks": (
        {"process_group": torch.distributed.GroupMember.NON_GROUP_MEMBER}, "process_group must contain this rank, 0",
    ),
}  # fmt: skip


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("options", "message"), GROUPS.values(), ids=GROUPS)
def test_groups_and_their_vocabularies(options, message, one_rank):
    with pytest.raises((TypeError, ValueError)) as refusal:
        tigon.linear_cross_entropy(**LINEAR, **{"process_group": one_rank} | options)
    assert str(refusal.value) == f"linear_cross_entropy: {message}"
