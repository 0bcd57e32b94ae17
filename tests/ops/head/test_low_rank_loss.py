"""The loss of a head with an adapter, whose kernels add h B^T themselves and compute dh.

Only half-precision logits take these kernels; `test_linear_cross_entropy.py` has the other tests of `low_rank`.
"""

import pytest
import torch

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from tigon.ops.head.chunks import ChunkConfig
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.head.low_rank_loss import LowRankGradientConfig, LowRankLossProblem, LowRankStatisticsConfig
from tigon.ops.logits.cross_entropy import log_probs_and_entropy_reference
from tigon.runtime.device import Device
from tigon.runtime.tuning import tuned
from tigon.testing import assert_accurate

# 3 blocks of tokens and 2 parts of the vocabulary, both with a remainder. With fewer tokens, the largest error of
# eager code would depend on chance.
T, H, V = 83, 16, 101
TILES = {"block_t": 32, "block_n": 16, "num_stages": 1}


def _inputs(
    dtype: torch.dtype, rank: int, factor_dtype: torch.dtype, vocabulary: int = V
) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    dtypes = [dtype] * 3 + [factor_dtype] * 2
    tensors = [
        torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
        for shape, dtype in zip(
            ((T, H), (vocabulary, H), (vocabulary,), (T, rank), (vocabulary, rank)), dtypes, strict=True
        )
    ]
    x, w, bias, h, b = (each.detach().float() for each in tensors)
    # Half of the targets are likely, so that many tokens have gradients of the largest size.
    target = (x @ w.t() + bias + h @ b.t()).argmax(-1)
    target[1::2] = torch.randint(vocabulary, (T // 2,), generator=generator).to(DEVICE)
    target[2::4] = -100
    return tensors, target


OPTIONS = {
    "plain": {},
    "none": {"reduction": "none"},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 0.5, "z_loss": 0.01},
    "all, none": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 0.5, "z_loss": 0.01, "reduction": "none"},
    "token scaling, none": {"token_scaling": True, "reduction": "none"},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# Rank 40 has a kernel of its own for dh. A vocabulary of 112 consists of whole tiles, which are loaded without masks.
@one_in(
    5,
    options=OPTIONS,
    dtype=DTYPES,
    rank=[5, 16, 17, 40],
    factors={"fp32": torch.float32, "half": None},
    vocabulary=[V, 112],
)
def test_every_option_is_as_accurate_as_eager_code(options, dtype, rank, factors, vocabulary):
    tensors, target = _inputs(dtype, rank, factors or dtype, vocabulary)
    weight = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.1 if rank == 17 else None

    def run(function):
        def call(x, w, bias, h, b):
            loss = function(x, w, target, linear_bias=bias, low_rank=(h, b), weight=weight, **options)
            # The error of one mean is a matter of chance. Its gradients are compared, and the losses of all tokens.
            return loss if loss.dim() else loss - loss.detach()

        return call

    with (
        tuned(ChunkConfig, tokens=48),
        tuned(LowRankStatisticsConfig, **TILES),
        tuned(LowRankGradientConfig, **TILES),
    ):
        assert_as_accurate_as_eager(
            run(tigon.linear_cross_entropy), run(linear_cross_entropy_reference), tensors, loss=True
        )


def test_results_of_tokens_and_their_gradients_contain_the_addition():
    tensors, target = _inputs(torch.bfloat16, 5, torch.float32)

    def op(x, w, bias, h, b):
        output = tigon.linear_cross_entropy(
            x, w, target, linear_bias=bias, low_rank=(h, b), return_log_probs=True, return_entropy=True
        )
        return (output.log_probs * 2 - output.entropy) + output.loss

    def reference(x, w, bias, h, b):
        logits = (torch.nn.functional.linear(x, w, bias) + h @ b.t()).to(x.dtype)
        log_probs, entropy = log_probs_and_entropy_reference(logits, target)
        loss = linear_cross_entropy_reference(x, w, target, linear_bias=bias, low_rank=(h, b))
        return (log_probs * 2 - entropy) + loss

    with tuned(LowRankStatisticsConfig, **TILES), tuned(LowRankGradientConfig, **TILES):
        assert_as_accurate_as_eager(op, reference, tensors, loss=True)


def test_predicted_tokens_are_those_of_the_sum():
    (x, w, bias, h, b), target = _inputs(torch.bfloat16, 5, torch.float32)
    with torch.no_grad(), tuned(LowRankStatisticsConfig, **TILES):
        predicted = tigon.linear_cross_entropy(
            x, w, target, linear_bias=bias, low_rank=(h, b), return_predicted_tokens=True
        ).predicted_tokens
        logits = torch.nn.functional.linear(x, w, bias).double() + h.double() @ b.double().t()
    is_valid = target != -100
    assert (predicted[~is_valid] == -1).all()
    highest = logits[is_valid].amax(-1)
    chosen = logits[is_valid].gather(1, predicted[is_valid][:, None])[:, 0]
    # In torch the sum is rounded to bf16, so nearly equal logits are a tie.
    assert (highest - chosen <= 2**-7 * highest.abs()).all()


@pytest.mark.parametrize("target", [V, -1])
def test_a_target_outside_of_the_vocabulary_makes_its_token_nan(target):
    (x, w, bias, h, b), _ = _inputs(torch.bfloat16, 5, torch.float32)
    targets = torch.arange(T, device=DEVICE)
    targets[3] = target
    losses = tigon.linear_cross_entropy(x, w, targets, linear_bias=bias, low_rank=(h, b), reduction="none")
    losses.backward(torch.ones_like(losses))
    is_wrong = torch.arange(T, device=DEVICE) == 3
    assert torch.equal(losses.isnan(), is_wrong)
    assert torch.equal(h.grad.isnan().any(1), is_wrong)


def test_an_addition_that_is_large_is_exact_too():
    """The low-rank part decides the logits here, so its products must not round h and B to one bf16 term."""
    (x, w, bias, h, b), target = _inputs(torch.bfloat16, 5, torch.float32)
    with torch.no_grad():
        h *= 8
    exact = linear_cross_entropy_reference(
        x.double(),
        w.double(),
        target,
        linear_bias=bias.double(),
        low_rank=(h.double(), b.double()),
        reduction="none",
    )
    eager = linear_cross_entropy_reference(x, w, target, linear_bias=bias, low_rank=(h, b), reduction="none")
    actual = tigon.linear_cross_entropy(x, w, target, linear_bias=bias, low_rank=(h, b), reduction="none")
    assert_accurate(actual, eager, exact)


@pytest.mark.parametrize("vocabulary", [V, 112])
def test_gradients_of_masked_tokens_are_zero_for_any_logits(vocabulary):
    (x, w, bias, h, b), target = _inputs(torch.bfloat16, 16, torch.float32, vocabulary)
    is_masked = target == -100
    with torch.no_grad():
        x[is_masked] = float("inf")
        h[is_masked] = float("nan")
    with tuned(LowRankStatisticsConfig, **TILES), tuned(LowRankGradientConfig, **TILES):
        tigon.linear_cross_entropy(x, w, target, linear_bias=bias, low_rank=(h, b)).backward()
    for gradient in (x.grad, w.grad, bias.grad, h.grad, b.grad):
        assert gradient.isfinite().all()
    assert (h.grad[is_masked] == 0).all()


@pytest.mark.parametrize("rank", [16, 32, 64, 128])
@pytest.mark.parametrize("is_complex", [False, True])
def test_tiles_of_high_ranks_and_many_options_are_smaller(rank, is_complex):
    h100 = Device(132, 32, 227 * 1024, True, "sm_90")
    problem = LowRankLossProblem(rank, 2, is_complex)
    statistics, gradient = (cls.heuristic(problem, h100) for cls in (LowRankStatisticsConfig, LowRankGradientConfig))
    assert gradient.block_n == (32 if is_complex or rank > 32 else 64)
    assert (statistics.num_stages == 1) == (rank > 64)
