"""Shards that are rounded by themselves, and the weights that are made of them, have the bits of a rounded weight."""

import pytest
import torch

import tigon
from op_cases import DEVICE
from tigon.ops.fp8.formats import WEIGHT_DTYPE, Factor
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.gathered_weights import GatheredWeight, share_scale
from tigon.ops.fp8.shards import find_maxima, maximum_of, round_shard
from tigon.ops.fp8.weights import quantise_weights

H = 80


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def assert_same_factor(actual: Factor, expected: Factor) -> None:
    # With another scale, all results of products are NaN, whatever the values are.
    if expected.scale.isfinite():
        assert torch.equal(bits(actual.values), bits(expected.values))
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0, atol=0, equal_nan=True)


def make_weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((48, H), (32, H), (16, H))
    return [(torch.randn(shape, generator=generator) * 3**i).to(DEVICE, dtype) for i, shape in enumerate(shapes)]


def gather(weights: list[torch.Tensor], ranks: int = 3, group: int = 0) -> list[GatheredWeight]:
    """Round the shards of each rank with the scale of all weights, as FSDP2 does, and return the gathered weights."""
    shards = [list(torch.tensor_split(weight, ranks)) for weight in weights]
    # The last rank of a small weight may have no rows.
    shards = [[*each, each[0][:0]] for each in shards]
    maxima = [find_maxima([[weight[rank] for weight in shards]], weights[0].device) for rank in range(ranks + 1)]
    maximum = maximum_of(torch.stack(maxima).amax(0), 0)
    gathered = []
    for weight, parts in zip(weights, shards, strict=True):
        factors = [round_shard(part, maximum) for part in parts]
        values = torch.cat([bits(factor.values) for factor in factors]).view(WEIGHT_DTYPE)
        gathered.append(GatheredWeight.make(values, factors[0].scale, group, weight.dtype))
    return gathered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [1.0, 0.0, float("inf"), float("nan")])
def test_rounded_shards_have_the_bits_of_the_rounded_weights(dtype, special):
    weights = make_weights(dtype)
    if special == 0:
        weights = [torch.zeros_like(weight) for weight in weights]
    weights[1][5, 7] *= special
    expected = quantise_weights(weights, False, True, True)
    actual = quantise_weights(gather(weights), False, True, True)
    start = 0
    for weight in weights:
        assert_same_factor(actual.rows_of(start, start + len(weight)), expected.rows_of(start, start + len(weight)))
        start += len(weight)
    assert_same_factor(actual.transposed, expected.transposed)


def test_maxima_of_groups_are_separate():
    weights = make_weights()
    maxima = find_maxima([weights[:2], weights[2:], [weights[0][:0]]], weights[0].device)
    actual = [maximum_of(maxima, i).view(torch.float32).item() for i in range(3)]
    assert actual == [max(w.abs().max().item() for w in weights[:2]), weights[2].abs().max().item(), 0.0]


def test_layers_with_gathered_weights_have_the_bits_of_rounded_weights():
    weights = make_weights()
    x = torch.randn(24, H).to(DEVICE, torch.bfloat16)
    results = []
    for each in (weights, gather(weights)):
        leaf = x.clone().requires_grad_()
        parameters = [torch.nn.Parameter(weight) for weight in each]
        outputs = fp8_projections(leaf, parameters, [None] * 3)
        sum(y.float().square().sum() for y in outputs).backward()
        results.append([*outputs, leaf.grad, *(p.grad for p in parameters)])
    assert all(type(y) is torch.Tensor and torch.equal(y, z) for y, z in zip(results[1], results[0], strict=True))


@pytest.mark.parametrize("lean", [False, True])
def test_a_gated_mlp_with_gathered_weights_has_the_bits_of_rounded_weights(lean):
    gate, up, down = torch.randn(48, H), torch.randn(48, H), torch.randn(H, 48)
    weights = [weight.to(DEVICE, torch.bfloat16) for weight in (gate, up, down)]
    x = torch.randn(24, H).to(DEVICE, torch.bfloat16)
    results = []
    for each in (weights, [*gather(weights[:2], group=0), *gather(weights[2:], group=1)]):
        leaf = x.clone().requires_grad_()
        parameters = [torch.nn.Parameter(weight) for weight in each]
        with tigon.lean(mlp=lean):
            y = fp8_glu_mlp(leaf, *parameters)
        y.float().square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in parameters)])
    assert all(torch.equal(y, z) for y, z in zip(results[1], results[0], strict=True))


def test_other_operations_read_the_rounded_values():
    (weight,) = gather(make_weights()[:1])
    rounded = (weight.factor.values.float() * weight.factor.scale).bfloat16()
    x = torch.randn(4, H).to(DEVICE, torch.bfloat16)
    assert type(weight + 1) is torch.Tensor
    assert torch.equal(weight + 1, rounded + 1)
    assert torch.equal(torch.cat([weight, weight]), torch.cat([rounded, rounded]))
    parameter, plain = torch.nn.Parameter(weight), torch.nn.Parameter(rounded)
    assert type(parameter) is GatheredWeight
    for each in (parameter, plain):
        torch.nn.functional.linear(x, each).square().sum().backward()
    assert torch.equal(parameter.grad, plain.grad)
    with pytest.raises(RuntimeError, match=r"add_\.Tensor would write to a weight that is gathered in FP8"):
        weight.add_(1)


def test_weights_with_other_scales_are_no_product():
    a, b = make_weights()[:2]
    gathered = [*gather([a], group=0), *gather([b], group=1)]
    assert [share_scale(each) for each in ([a, b], gather([a, b]))] == [True, True]
    assert [share_scale(each) for each in (gathered, [a, gathered[1]])] == [False, False]
    x = torch.randn(4, H).to(DEVICE, torch.bfloat16)
    for weights in (gathered, [a, gathered[1]]):
        with pytest.raises(ValueError, match="only layers that share a scale can be one product"):
            fp8_projections(x, weights, [None] * 2)
    with pytest.raises(ValueError, match="weights that were gathered in FP8 have one scale each"):
        fp8_projections(x, gathered[:1], [None], recipe="rowwise")
