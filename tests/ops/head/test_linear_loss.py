"""`linear_loss`: three products if the loss is a sum over parts of the batch, and four otherwise."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from tigon.ops.head import linear_loss as module
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_loss import eager_linear_loss
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
    "token": (token_loss, (values(SEQUENCES, LENGTH),)), "sequence": (sequence_loss, (values(SEQUENCES),)),
    "pair": (pair_loss, (values(SEQUENCES, LENGTH), values(SEQUENCES // 2, seed=4))), "batch": (batch_loss, ()),
}  # fmt: skip


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
    return result[0] if isinstance(result, (tuple, list)) else result


@pytest.fixture
def in_parts(monkeypatch):
    """Record the number of parts of each call, and 0 for a call with four products."""
    numbers: list[int] = []
    divide = module.divide_batch

    def spy(*args: Any, **options: Any) -> Any:
        result = divide(*args, **options)
        numbers.append(0 if result is None else max(1, len(result.parts)))
        return result

    monkeypatch.setattr(module, "divide_batch", spy)
    return numbers


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("group", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.sampled(in_interpreter=5)
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


@one_in(1, ignored=["none", "some"], group=["sequence", "pair"])
def test_packed_sequences_may_leave_tokens_out(group, ignored, in_parts):
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


@pytest.mark.parametrize("bounds", [[0], [0, 0, 1, 3, 4, 6, 6], [1, 4, 5], [0, 5, 2, 6], [0, 3, 9]], ids=str)
def test_any_boundaries_give_the_loss_of_eager_code(bounds):
    """The function decides what boundaries mean, also those that leave tokens out, decrease or exceed the tokens."""
    hidden, weight, bias, _ = make()
    hidden, targets = hidden.detach().flatten(0, 1)[:6].requires_grad_(), torch.arange(6, device=DEVICE)
    call = lambda function: (
        lambda hidden, weight, bias: function(
            hidden, weight, targets, lambda x, y, cu_seqlens: (x * y).sum(), values(6), group="sequence", bias=bias,
            cu_seqlens=torch.tensor(bounds, device=DEVICE),
        )
    )  # fmt: skip
    with tuned(ChunkConfig, tokens=4):
        assert_as_accurate_as_eager(call(tigon.linear_loss), call(eager_linear_loss), [hidden, weight, bias], loss=True)


ADVANTAGES, MASK = values(SEQUENCES), values(SEQUENCES, LENGTH, seed=9) > -0.5


class LossAndSums(NamedTuple):
    loss: Tensor
    sums: Tensor


def drops_tokens(log_probs: Tensor) -> Tensor:
    return -torch.nn.functional.dropout(log_probs, 0.5).mean()


def writes_in_place(log_probs: Tensor) -> Tensor:
    log_probs.detach().sub_(0.5)
    return log_probs.mul_(2.0).exp().sum()


def adds_noise(log_probs: Tensor) -> Tensor:
    return -(log_probs + torch.randn_like(log_probs)).exp().sum()


# Functions that are sums over their sequences, with their dtype and their shape.
SUMS = {
    "a sum": lambda x: x.exp().sum(), "a mean": lambda x: x.exp().mean(),
    "a sum, divided by the tokens of the batch": lambda x: -(x * MASK).sum() / MASK.sum(),
    "a weighted sum of sequences": lambda x: (ADVANTAGES * x.sum(-1)).sum() / ADVANTAGES.abs().sum(),
    "one element": lambda x: x.exp().sum().reshape(1, 1), "in fp64": lambda x: x.double().exp().mean(),
    "with infinities at a probability of one": lambda x: -(x - torch.log1p(-x.exp().clamp(max=1 - 1e-6))).mean(),
    "a list": lambda x: [x.exp().sum(), "a metric"],
    "a named tuple": lambda x: LossAndSums(x.exp().sum(), x.detach().sum(-1)), "dropout": drops_tokens,
    "noise": adds_noise, "written in place": writes_in_place,
    "random signs of sequences": lambda x: (x.sum(-1) * torch.randint(2, (len(x),), device=x.device)).sum(),
}  # fmt: skip


@one_in(3, name=list(SUMS), tokens=[LENGTH, 2 * LENGTH, SEQUENCES * LENGTH])
@pytest.mark.sampled(in_interpreter=3)
def test_a_loss_that_is_any_sum_over_its_sequences_is_right(name, tokens, in_parts):
    results = []
    for function in (eager_linear_loss, tigon.linear_loss):
        hidden, weight, _, targets = make(ignored="none")
        torch.manual_seed(5)
        with tuned(ChunkConfig, tokens=tokens):
            result = function(hidden, weight, targets, SUMS[name], group="sequence")
        # The random state afterwards is that after one call.
        results.append((result, torch.autograd.grad(loss_of(result), [hidden, weight]), torch.rand(2, device=DEVICE)))
    (expected, expected_gradients, expected_random), (actual, gradients, random) = results
    assert in_parts == [SEQUENCES * LENGTH // tokens]
    assert type(actual) is type(expected)
    assert (loss_of(actual).dtype, loss_of(actual).shape) == (loss_of(expected).dtype, loss_of(expected).shape)
    torch.testing.assert_close(loss_of(actual), loss_of(expected))
    torch.testing.assert_close(gradients, expected_gradients, rtol=2e-5, atol=1e-6)
    assert torch.equal(random, expected_random)


NO_SUMS = {
    "a function of the mean": batch_loss, "a product of sequences": lambda x: x.mean(-1).prod(),
    "relative to the mean of the batch": lambda x: (x * (x - x.mean()).detach()).sum(),
    "relative to the next sequence": lambda x: (x * x.detach().roll(1, 0)).sum(),
    "the logarithm of a sum": lambda x: x.logsumexp((0, 1)),
    "random numbers of its own generator": lambda x: (x * torch.rand(x.shape, generator=GENERATOR).to(x)).sum(),
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the next call raises the error")
@pytest.mark.parametrize("name", NO_SUMS)
@pytest.mark.sampled(in_interpreter=2)
def test_a_loss_that_is_no_sum_over_its_units_is_refused(name):
    hidden, weight, _, targets = make(ignored="none")
    with (
        tuned(ChunkConfig, tokens=2 * LENGTH),
        pytest.raises(ValueError, match="linear_loss: the loss of loss_fn must"),
    ):
        tigon.linear_loss(hidden, weight, targets, NO_SUMS[name], group="sequence")
    # In one part, any function is right.
    tigon.linear_loss(hidden, weight, targets, NO_SUMS[name], group="sequence")


@pytest.mark.gpu
def test_a_gpu_makes_a_loss_that_is_no_sum_nan_and_works_on():
    hidden, weight, _, targets = make(ignored="none")
    call = lambda loss_fn: tigon.linear_loss(hidden, weight, targets, loss_fn, group="sequence")
    with tuned(ChunkConfig, tokens=2 * LENGTH):
        loss = call(batch_loss)
        assert loss.isnan()
        assert all(g.isnan().all() for g in torch.autograd.grad(loss, [hidden, weight]))
        with pytest.raises(ValueError, match="linear_loss: the loss of loss_fn must be a sum"):
            call(lambda x: x.sum())
        assert call(lambda x: x.sum()).isfinite()
        with pytest.raises(ValueError, match="linear_loss: loss_fn must return"):
            call(lambda x: x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_outside_of_the_vocabulary_makes_its_log_probability_nan(target, group):
    hidden, weight, _, targets = make(ignored="none")
    targets[2, 1] = target
    seen = []

    def loss_fn(log_probs: Tensor) -> Tensor:
        seen.append(log_probs.detach().clone())
        return log_probs.sum()

    with tuned(ChunkConfig, tokens=2 * LENGTH):
        assert tigon.linear_loss(hidden, weight, targets, loss_fn, group=group).isnan()
    assert seen[-1].isnan().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("shape", [(SEQUENCES + 1, LENGTH), (SEQUENCES, LENGTH + 1)], ids=str)
def test_arguments_of_wrong_lengths_are_refused_by_torch(shape):
    hidden, weight, _, targets = make()
    with tuned(ChunkConfig, tokens=2 * LENGTH), pytest.raises(RuntimeError, match="must match the size"):
        tigon.linear_loss(hidden, weight, targets, lambda x, y: (x * y).sum(), values(*shape), group="sequence")


def test_a_checkpointed_loss_has_the_gradients_of_one_that_is_not():
    results = []
    for is_checkpointed in (False, True):
        hidden, weight, _, targets = make()
        call = lambda hidden, weight, targets=targets: tigon.linear_loss(
            hidden, weight, targets, drops_tokens, group="sequence"
        )
        torch.manual_seed(5)
        with tuned(ChunkConfig, tokens=2 * LENGTH):
            loss = checkpoint(call, hidden, weight, use_reentrant=False) if is_checkpointed else call(hidden, weight)
            results.append((loss, *torch.autograd.grad(loss, [hidden, weight])))
    torch.testing.assert_close(*results)


def test_losses_that_cancel_are_no_failure():
    """On policy, the losses of a prompt's completions sum to zero, so nothing but rounding errors is left."""
    generator = torch.Generator().manual_seed(13)
    hidden, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((8, 33, 16), (61, 16)))
    targets = torch.randint(61, (8, 33), generator=generator)
    targets[torch.arange(33) >= torch.randint(5, 33, (8, 1), generator=generator)] = -100
    advantages = torch.randn(4, generator=generator).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(4)
    tensors = [x.to(DEVICE) for x in (hidden, weight, targets, advantages)]
    with tuned(ChunkConfig, tokens=66):
        loss, _ = tigon.GRPOLoss(loss_type="grpo")(*tensors)
    assert loss.abs() < 1e-6


OTHER_ROWS = tigon.ValidRows(torch.zeros(42, dtype=torch.int64))
REFUSALS = [
    ({"loss_fn": 3}, "loss_fn must be callable, got int"),
    ({"group": "row"}, "group must be"),
    ({"loss_fn": lambda x: x}, r"loss_fn must return .*, got shape \(6, 7\)"),
    ({"loss_fn": lambda x: None}, "loss_fn must return .*, got NoneType"),
    ({"rows": 5, "group": "pair"}, "targets must have an even number .*, got 5"),
    ({"flat": True, "group": "sequence"}, r"targets must have shape \(N, L\).*\(42,\)"),
    ({"cu_seqlens": torch.tensor([0, 9])}, r"targets must have shape \(T,\) with cu_seqlens"),
    ({"cu_seqlens": torch.tensor(3), "flat": True}, r"cu_seqlens must have shape \(N \+ 1"),
    ({"cu_seqlens": torch.tensor([0, 9, 42, 42]), "flat": True, "group": "pair"}, "targets must have an even .* 3"),
    ({"valid_rows": OTHER_ROWS}, "valid_rows must"),
    ({"max_logits_mib": 0}, "max_logits_mib must be at least 1"),
    ({"temperature": 0.0}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=["-".join(map(str, x)) for x, _ in REFUSALS])
def test_bad_input_is_refused(changes, message):
    hidden, weight, _, targets = make()
    changes = dict(changes)
    loss_fn = changes.pop("loss_fn", lambda x: x.mean())
    if (rows := changes.pop("rows", None)) is not None:
        hidden, targets = hidden[:rows], targets[:rows]
    if changes.pop("flat", False):
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
    with pytest.raises((TypeError, ValueError), match=f"^linear_loss: {message}"):
        tigon.linear_loss(hidden, weight, targets, loss_fn, **changes)


@pytest.mark.parametrize(("group", "parts"), [("sequence", 3), ("pair", 3), ("token", 4), ("batch", 1)])
def test_the_function_takes_the_whole_batch_once_for_each_part(group, parts):
    hidden, weight, _, targets = make(ignored="none")
    shapes = []

    def loss_fn(log_probs: Tensor, advantages: Tensor) -> Tensor:
        shapes.append((log_probs.shape, advantages.shape))
        return (log_probs * advantages).sum()

    with tuned(ChunkConfig, tokens=2 * LENGTH - 2 * (group == "token")):
        tigon.linear_loss(hidden, weight, targets, loss_fn, values(SEQUENCES, LENGTH), group=group)
    shape = (SEQUENCES * LENGTH,) if group == "token" else (SEQUENCES, LENGTH)
    assert shapes == [(shape, shape)] * parts
