"""A sharded vocabulary gives the results of the whole one. Here one process holds all shards."""

import pytest
import torch

from op_cases import DEVICE, assert_as_accurate_as_eager, one_in
from tigon.ops.logits.cross_entropy import cross_entropy_reference, log_probs_and_entropy_reference
from tigon.ops.logits.token.kernels import (
    Options,
    Shard,
    Statistics,
    Upstream,
    Wants,
    gradient,
    gradient_scales,
    statistics,
)
from tigon.ops.logits.vocab_parallel import combined_statistics, partial_statistics

# The column counts of the shards. A block of the kernels has 2048 columns. The first entry has only one shard.
V = 5000
SHARD_SIZES = [(V,), (1, V - 1), (2100, 2900), (700, 2048, 2252), (3000, 2000, 0)]

OPTIONS = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "logit scale": {"logit_scale": 0.25},
    "z-loss": {"z_loss": 0.05},
    "token scaling": {"token_scaling": True},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "token_scaling": True},
}
EVERYTHING = Wants(z_loss=True, predicted=True, log_probs=True, entropy=True)

SHARD_PARAMS = [
    pytest.param(sizes, marks=pytest.mark.thorough) if sizes in ((V,), (2100, 2900)) else sizes for sizes in SHARD_SIZES
]
each_sharding = pytest.mark.parametrize("sizes", SHARD_PARAMS, ids=str)


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [M, V], targets [M] at both ends of shards, and class weights [V]."""
    target = torch.tensor([0, 1, -100, 699, 700, 2100, 2748, V - 1], device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(len(target), V, generator=generator) * 4).to(DEVICE, dtype)
    return logits, target, torch.rand(V, generator=generator).to(DEVICE) + 0.1


def _shards(sizes: tuple[int, ...], v: int = V) -> list[Shard]:
    return [Shard(sum(sizes[:p]), v) for p in range(len(sizes))]


class _Sharded(torch.autograd.Function):
    """An autograd function that computes all statistics of logits, and their gradient, from shards."""

    @staticmethod
    def forward(ctx, logits, target, weight, sizes, options, wants):
        scales = gradient_scales(target, weight, None, logits.shape[1], options.ignore_index, False)
        ctx.parts = list(zip(logits.split(sizes, 1), _shards(sizes, logits.shape[1]), strict=True))
        partials = [partial_statistics(part, target, weight, options, shard, wants) for part, shard in ctx.parts]
        assert all(partial.shape == (len(logits), 6) for partial in partials)
        result = combined_statistics(torch.stack(partials), target, weight, scales, options, wants, sizes)
        ctx.result, ctx.options, ctx.target, ctx.weight, ctx.scales = result, options, target, weight, scales
        ctx.mark_non_differentiable(result.predicted)
        return result.loss, result.z_loss, result.predicted, result.log_probs, result.entropy

    @staticmethod
    def backward(ctx, dloss, _z_loss, _predicted, dlog_probs, dentropy):
        result, parts = ctx.result, []
        upstream = Upstream(
            dloss, dlog_probs if len(result.log_probs) else None, dentropy if len(result.entropy) else None
        )
        for part, shard in ctx.parts:
            out = torch.empty_like(part)
            parts.append(
                gradient(part, ctx.target, ctx.weight, ctx.scales, result, upstream, ctx.options, out=out, shard=shard)
            )
        return torch.cat(parts, 1), *[None] * 5


def _sharded(x, target, weight, sizes, **options) -> tuple[torch.Tensor, ...]:
    return _Sharded.apply(x, target, weight, sizes, Options(**options), EVERYTHING)


def _whole(logits, target, weight, options: Options, upstream: Upstream) -> tuple[Statistics, torch.Tensor]:
    scales = gradient_scales(target, weight, None, logits.shape[1], options.ignore_index, False)
    result = statistics(logits, target, weight, scales, options, EVERYTHING)
    out = torch.empty_like(logits)
    return result, gradient(logits, target, weight, scales, result, upstream, options, out=out)


@one_in(3, options=OPTIONS, sizes=SHARD_SIZES)
def test_sharded_loss_is_as_accurate_as_eager_code(options, sizes):
    logits, target, weight = _inputs()
    transform = {name: options[name] for name in ("softcap", "logit_scale") if name in options}

    def run(x):
        loss, _, _, log_probs, entropy = _sharded(x, target, weight, sizes, **options)
        return loss, log_probs, entropy

    def reference(x):
        loss = cross_entropy_reference(x, target, weight, reduction="none", **options)
        return loss, *log_probs_and_entropy_reference(x, target, **transform)

    assert_as_accurate_as_eager(run, reference, [logits.requires_grad_()], loss=True, term_size=1.0)


@one_in(2, dtype=[torch.float16, torch.float32], sizes=SHARD_SIZES)
def test_gradient_may_overwrite_the_logits(dtype, sizes):
    logits, target, weight = _inputs(dtype)
    options, upstream = Options(**OPTIONS["all"]), Upstream(None, None, torch.ones(len(target), device=DEVICE))
    result, expected = _whole(logits, target, weight, options, upstream)
    scales = gradient_scales(target, weight, None, V, -100, False)
    for part, shard in zip(logits.split(sizes, 1), _shards(sizes), strict=True):
        gradient(part, target, weight, scales, result, upstream, options, out=part, shard=shard)
    torch.testing.assert_close(logits, expected)


@each_sharding
def test_predicted_token_is_the_first_of_equal_logits(sizes):
    logits, target = torch.zeros(5, V, device=DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    logits[1, [2748, 4999]] = 5.0
    logits[2, [0, 1, 4999]] = 5.0
    logits[3, [2099, 2100]] = 5.0
    logits[4] = -torch.inf
    predicted = _sharded(logits, target, None, sizes)[2]
    assert predicted.tolist() == [0, 2748, 0, 2099, 0]


@one_in(2, smoothing={"": 0.0, "label smoothing": 0.1}, sizes=SHARD_SIZES)
def test_logits_of_a_shard_may_all_be_minus_infinity(smoothing, sizes):
    """The other shards, whose logits are far below zero, must still contribute."""
    logits, target, weight = _inputs()
    logits = logits - 500.0
    logits[:, 2090:] = -torch.inf
    target = target.clamp(max=2000)
    options = Options(label_smoothing=smoothing, z_loss=1e-6)
    result, _ = _whole(logits, target, weight, options, Upstream())
    outputs = _Sharded.apply(logits.requires_grad_(), target, weight, sizes, options, EVERYTHING)
    for actual, expected in zip(outputs, result[:1] + result[2:6], strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    # With label smoothing, a class of probability zero makes the loss infinite.
    if not smoothing:
        (actual,) = torch.autograd.grad(sum(y.sum() for y in (outputs[0], *outputs[3:])), logits)
        assert actual.isfinite().all()
        assert (actual[:, 2090:] == 0).all()


@one_in(4, bad=[V, 2**40, -1, -101], sizes=SHARD_SIZES)
def test_out_of_range_target_gives_nan_in_its_row_only(bad, sizes):
    logits, target, _ = _inputs()
    target[4] = bad
    loss, _, _, log_probs, entropy = _sharded(logits.requires_grad_(), target, None, sizes, token_scaling=True)
    (actual,) = torch.autograd.grad(loss.sum(), logits)
    expected = [i == 4 for i in range(len(target))]
    assert loss.isnan().tolist() == log_probs.isnan().tolist() == expected
    assert actual.isnan().all(-1).tolist() == actual.isnan().any(-1).tolist() == expected
    assert entropy.isfinite().all()


@each_sharding
def test_ignored_rows_may_hold_any_values(sizes):
    logits, target, weight = _inputs()
    logits[2] = torch.nan
    outputs = _sharded(logits.requires_grad_(), target, weight, sizes, **OPTIONS["all"])
    assert [y[2].item() for y in outputs] == [0, 0, -1, 0, 0]
    (actual,) = torch.autograd.grad(sum(y.sum() for y in (outputs[0], *outputs[3:])), logits)
    assert (actual[2] == 0).all()
    assert actual.isfinite().all()
