"""`linear_loss`: three products if the loss is a sum over parts of the batch, and four otherwise."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager
from tigon.losses import dpo_loss, grpo_loss
from tigon.ops.head import linear_loss as module
from tigon.ops.head.chunks import ChunkConfig, ChunkProblem
from tigon.ops.head.linear_loss import eager_linear_loss
from tigon.runtime.device import EMULATED
from tigon.runtime.tuning import tuned

pytestmark = pytest.mark.kernels

HIDDEN, VOCABULARY, SEQUENCES, LENGTH = 24, 61, 6, 7


def token_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    return -(log_probs.exp() * advantages).mean()


def sequence_loss(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    sums = log_probs.sum(-1)
    return -(advantages * sums.tanh()).mean(), {"sums": sums.detach()}


def pair_loss(log_probs: Tensor, reference: Tensor, margins: Tensor) -> Tensor:
    chosen, rejected = (log_probs - reference).sum(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected) - margins).mean()


def batch_loss(log_probs: Tensor) -> Tensor:
    # The value is far below one, so the rounding errors of the log-probabilities do not matter.
    return log_probs.mean().exp()


def values(*shape: int, seed: int = 3, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(DEVICE)


# The loss function and the arguments of each group.
LOSSES: dict[str, tuple[Any, tuple]] = {
    "token": (token_loss, (values(SEQUENCES, LENGTH),)),
    "sequence": (sequence_loss, (values(SEQUENCES),)),
    "pair": (pair_loss, (values(SEQUENCES, LENGTH), values(SEQUENCES // 2, seed=4))),
    "batch": (batch_loss, ()),
}


def make(dtype: torch.dtype = torch.float32, ignored: str = "some") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = values(SEQUENCES, LENGTH, HIDDEN, seed=0).to(dtype).requires_grad_()
    weight = values(VOCABULARY, HIDDEN, seed=1, scale=0.3).to(dtype).requires_grad_()
    bias = values(VOCABULARY, seed=2).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    if ignored == "some":
        targets[0, 2:] = targets[4, :3] = -100
        # A sequence without tokens.
        targets[1] = -100
    if ignored == "all":
        targets[:] = -100
    return hidden, weight, bias, targets


def loss_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.fixture
def in_parts(monkeypatch):
    """Limit parts to a few tokens, and record the number of parts of each call."""
    numbers: list[int] = []
    divide = module._divide

    def spy(*args: Any) -> Any:
        result = divide(*args)
        numbers.append(0 if result is None else len(result[1]))
        return result

    monkeypatch.setattr(module, "_divide", spy)
    return numbers


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("group", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.sampled(in_interpreter=2)
def test_loss_and_gradients_are_as_accurate_as_eager_code(group, ignored, dtype, in_parts):
    loss_fn, args = LOSSES[group]
    hidden, weight, bias, targets = make(dtype, ignored)
    options = {"group": group, "softcap": 3.0, "logit_scale": 0.7, "temperature": 0.8}
    call = lambda function: (
        lambda hidden, weight, bias: loss_of(function(hidden, weight, targets, loss_fn, *args, bias=bias, **options))
    )
    # Two sequences fit into a part.
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        assert_as_accurate_as_eager(call(tigon.linear_loss), call(eager_linear_loss), [hidden, weight, bias], loss=True)
    if dtype == torch.float32:
        is_divided = group != "batch" or ignored == "all"
        assert all((number > 0) == is_divided for number in in_parts)
        if ignored == "none" and is_divided:
            assert max(in_parts) >= 3


@pytest.mark.no_interpreter("It launches no kernel.")
def test_a_long_pair_may_exceed_the_budget_of_chunks():
    """Pairs of 2 x 2048 tokens with a vocabulary of 128256, whose logits take 1002 MiB in bf16."""
    config, token_bytes = ChunkConfig.heuristic(ChunkProblem(128256, 2, "cuda"), EMULATED), 128256 * 2
    assert config.token_limit(16384, token_bytes, None, 0) < 4096 <= config.unit_limit(token_bytes, None) < 8192
    assert config.unit_limit(token_bytes, 100) * token_bytes <= 100 * 2**20


@pytest.mark.parametrize(("limit", "products"), [(1, 4), (2 * LENGTH, 3), (SEQUENCES * LENGTH, 3)])
@pytest.mark.parametrize("group", ["sequence", "pair"])
def test_the_number_of_products(group, limit, products):
    from torch.utils.flop_counter import FlopCounterMode

    loss_fn, args = LOSSES[group]
    hidden, weight, _, targets = make(ignored="none")
    with FlopCounterMode(display=False) as counter, tuned(ChunkConfig, tokens=limit):
        loss_of(tigon.linear_loss(hidden, weight, targets, loss_fn, *args, group=group)).backward()
    assert counter.get_total_flops() == products * 2 * targets.numel() * HIDDEN * VOCABULARY
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tigon.linear_loss(hidden, weight, targets, loss_fn, *args, group=group)
    assert counter.get_total_flops() == 2 * targets.numel() * HIDDEN * VOCABULARY


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=2)), ids=str)
def test_each_gradient_depends_on_its_own_need(needs):
    hidden, weight, _, targets = make()
    hidden.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        loss, _ = tigon.linear_loss(hidden, weight, targets, sequence_loss, values(SEQUENCES), group="sequence")
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == needs


def test_the_loss_and_the_metrics_are_those_of_the_whole_batch():
    hidden, weight, _, targets = make()
    results = []
    for tokens in (2 * LENGTH, SEQUENCES * LENGTH):
        with tuned(ChunkConfig, tokens=tokens):
            results.append(
                tigon.linear_loss(hidden, weight, targets, sequence_loss, values(SEQUENCES), group="sequence")
            )
    (loss, metrics), (whole_loss, whole_metrics) = results
    assert metrics["sums"].shape == (SEQUENCES,)
    torch.testing.assert_close(loss, whole_loss)
    torch.testing.assert_close(metrics, whole_metrics)
    # A token that is ignored adds nothing.
    assert metrics["sums"][1] == 0


def test_arguments_of_the_loss_may_need_gradients():
    hidden, weight, _, targets = make()
    advantages = values(SEQUENCES).requires_grad_()
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        loss, _ = tigon.linear_loss(hidden, weight, targets, sequence_loss, advantages, group="sequence")
    actual = torch.autograd.grad(loss, [advantages, hidden])
    expected_loss, _ = eager_linear_loss(hidden, weight, targets, sequence_loss, advantages)
    torch.testing.assert_close(actual, torch.autograd.grad(expected_loss, [advantages, hidden]))


def test_the_entropy_reaches_the_loss_and_gets_gradients():
    def loss_fn(log_probs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
        return -(log_probs.exp() * advantages[:, None] + 0.1 * entropy.square()).mean()

    hidden, weight, bias, targets = make()
    options = {"group": "sequence", "with_entropy": True}
    call = lambda function: (
        lambda hidden, weight, bias: function(hidden, weight, targets, loss_fn, values(SEQUENCES), bias=bias, **options)
    )
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        assert_as_accurate_as_eager(call(tigon.linear_loss), call(eager_linear_loss), [hidden, weight, bias], loss=True)


@pytest.mark.parametrize("ignored", ["none", "some"])
@pytest.mark.parametrize("group", ["sequence", "pair"])
def test_packed_sequences_are_cut_with_their_boundaries_and_arguments(group, ignored, in_parts):
    """The arguments have one value for each token, for each sequence, and (if there are pairs) for each pair."""
    hidden, weight, bias, targets = make(ignored=ignored)
    hidden, targets = hidden.detach().flatten(0, 1).requires_grad_(), targets.flatten()
    # The first two tokens and the last token belong to no sequence, and one sequence is empty.
    cu_seqlens = torch.tensor([2, 9, 9, 20, 26, 33, 41], device=DEVICE)

    def loss_fn(log_probs, log_sum_sq_probs, per_token, per_sequence, *per_pair, cu_seqlens):
        tokens = log_probs * per_token + 0.1 * log_sum_sq_probs * log_probs
        rows = torch.searchsorted(cu_seqlens, torch.arange(len(tokens), device=DEVICE), right=True) - 1
        inside = (rows >= 0) & (rows < len(cu_seqlens) - 1)
        sums = tokens.new_zeros(len(cu_seqlens) - 1).index_add(0, rows[inside], tokens[inside])
        sums = sums.tanh() * per_sequence
        return (sums.chunk(2)[0] * sums.chunk(2)[1] * per_pair[0] if per_pair else sums).mean()

    args = [values(42, seed=6), values(6, seed=7), *([values(3, seed=8)] if group == "pair" else [])]
    options = {"group": group, "cu_seqlens": cu_seqlens, "with_sum_sq_probs": True}
    call = lambda function: (
        lambda hidden, weight, bias: function(hidden, weight, targets, loss_fn, *args, bias=bias, **options)
    )
    with tuned(ChunkConfig, tokens=21):
        assert_as_accurate_as_eager(call(tigon.linear_loss), call(eager_linear_loss), [hidden, weight, bias], loss=True)
    assert in_parts[0] >= 2
    # The shape of an argument does not say whether it belongs to tokens or to sequences.
    with tuned(ChunkConfig, tokens=4):
        tigon.linear_loss(
            hidden[:6], weight, targets[:6] * 0, lambda x, y, cu_seqlens: (x * y).mean(), values(6), group="sequence",
            cu_seqlens=torch.tensor([0, 0, 1, 3, 4, 6, 6], device=DEVICE),
        )  # fmt: skip
    assert in_parts[-1] == 0


def test_a_second_backward_and_a_scaled_loss():
    hidden, weight, _, targets = make()
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        loss, _ = tigon.linear_loss(hidden, weight, targets, sequence_loss, values(SEQUENCES), group="sequence")
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(3.0 * loss, [hidden, weight])
    torch.testing.assert_close(second, tuple(3.0 * g for g in first))


def test_the_losses_of_this_package_can_be_divided():
    hidden, weight, _, targets = make()
    mask = targets != -100
    reference, advantages = values(SEQUENCES, LENGTH) - 4.0, values(SEQUENCES)

    def dpo(log_probs: Tensor, reference: Tensor, mask: Tensor) -> Any:
        return dpo_loss(log_probs, mask, ref_log_probs=reference, beta=0.3)

    def grpo(log_probs: Tensor, reference: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        return grpo_loss(log_probs, advantages, mask, old_log_probs=reference, loss_type="grpo")

    for loss_fn, args, group in ((dpo, (reference, mask), "pair"), (grpo, (reference, advantages, mask), "sequence")):
        results = []
        for function in (tigon.linear_loss, eager_linear_loss):
            with tuned(ChunkConfig, tokens=2 * LENGTH):
                loss, metrics = function(hidden, weight, targets, loss_fn, *args, group=group)
            results.append((loss, metrics, torch.autograd.grad(loss, [hidden, weight])))
        torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE != "cpu", reason="a failed assertion on the GPU ends the process")
def test_a_loss_that_is_no_mean_over_its_units_fails():
    hidden, weight, _, targets = make()
    with tuned(ChunkConfig, tokens=2 * LENGTH), pytest.raises(RuntimeError, match="do not add up"):
        tigon.linear_loss(hidden, weight, targets, batch_loss, group="sequence")
    # The sum over sequences is not their mean.
    with tuned(ChunkConfig, tokens=2 * LENGTH), pytest.raises(RuntimeError, match="do not add up"):
        tigon.linear_loss(hidden, weight, targets, lambda x: x.exp().sum(), group="sequence")
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        tigon.linear_loss(hidden, weight, targets, lambda x: x.exp().sum(), group="sequence", reduction="sum")


@pytest.mark.parametrize("seed", [0, 13])
def test_losses_that_cancel_are_no_failure(seed):
    """On policy, the losses of a prompt's completions sum to zero, so nothing but rounding errors is left."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((8, 33, 16), (61, 16)))
    targets = torch.randint(61, (8, 33), generator=generator)
    targets[torch.arange(33) >= torch.randint(5, 33, (8, 1), generator=generator)] = -100
    advantages = torch.randn(4, generator=generator).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(4)
    tensors = [x.to(DEVICE) for x in (hidden, weight, targets, advantages)]
    with tuned(ChunkConfig, tokens=66):
        loss, _ = tigon.GRPOLoss(loss_type="grpo")(*tensors)
    assert loss.abs() < 1e-6


def test_one_sequence_and_one_token():
    weight = make()[1]
    for shape in ((1, 1), (1, 5), (0, 4)):
        hidden = values(*shape, HIDDEN).requires_grad_()
        targets = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        loss = tigon.linear_loss(hidden, weight, targets, lambda x: x.sum(), group="sequence", reduction="sum")
        loss.backward()
        assert hidden.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"loss_fn": 3}, TypeError, "linear_loss: loss_fn must be callable, got int"),
        ({"group": "row"}, ValueError, "linear_loss: group must be"),
        ({"reduction": "none"}, ValueError, "linear_loss: reduction must be"),
        ({"loss_fn": lambda x: x}, ValueError, r"linear_loss: loss_fn must return .*, got shape \(6, 7\)"),
        ({"loss_fn": lambda x: None}, ValueError, "linear_loss: loss_fn must return .*, got NoneType"),
        ({"rows": 5, "group": "pair"}, ValueError, "linear_loss: targets must have an even number .*, got 5"),
        ({"flat": True, "group": "sequence"}, ValueError, r"linear_loss: targets must have shape \(N, L\).*\(42,\)"),
        (
            {"cu_seqlens": torch.tensor([0, 9])},
            ValueError,
            r"linear_loss: targets must have shape \(T,\) with cu_seqlens",
        ),
        (
            {"cu_seqlens": torch.tensor(3), "flat": True},
            ValueError,
            r"linear_loss: cu_seqlens must have shape \(N \+ 1",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 9, 42, 42]), "flat": True, "group": "pair"},
            ValueError,
            "linear_loss: targets must have an even number of sequences .*, got 3",
        ),
        (
            {"valid_rows": tigon.ValidRows(torch.zeros(42, dtype=torch.int64))},
            ValueError,
            "linear_loss: valid_rows must",
        ),
        ({"max_logits_mib": 0}, ValueError, "linear_loss: max_logits_mib must be at least 1"),
        ({"temperature": 0.0}, ValueError, "linear_loss: temperature"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(changes, error, message):
    hidden, weight, _, targets = make()
    changes = dict(changes)
    loss_fn = changes.pop("loss_fn", lambda x: x.mean())
    if (rows := changes.pop("rows", None)) is not None:
        hidden, targets = hidden[:rows], targets[:rows]
    if changes.pop("flat", False):
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
    with pytest.raises(error, match=message):
        tigon.linear_loss(hidden, weight, targets, loss_fn, **changes)
