"""The kernels of the gated activation with adapters find the largest absolute values of what they write."""

import math

import pytest
import torch
from torch import Tensor

from op_cases import DEVICE, one_in
from tigon.ops.adapters.lora_glu import GLUAdapters, lora_glu_backward, lora_glu_forward

pytestmark = pytest.mark.kernels

# The interpreter truncates bf16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# No tile of tokens or of features is full.
TOKENS, INNER, RANK = 150, 104, 5


def _positive(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.5).to(DEVICE)


def _hidden(value: float) -> Tensor:
    """Return the terms of h [3, T, r]. The first token has the value."""
    h = torch.zeros(3, TOKENS, RANK, dtype=torch.bfloat16, device=DEVICE)
    h[0] = _positive(TOKENS, RANK)
    h[0, 0] = value
    return h


def _check(h: Tensor, dh: Tensor, value: float, place: int | None) -> None:
    """Check both directions: the maximum is that of the results, which are the same with it and without it.

    up has the value at `place` in forward, and da in backward. The other values are positive.
    """
    # The weights are positive, and so are their second terms in bf16.
    weight = torch.full((INNER, RANK), 1 + 2.0**-9, device=DEVICE)
    adapters = GLUAdapters(torch.cat((h, h), 2), weight, weight, weight.t().contiguous(), 0.1, 0.1)
    gate, up, da = (_positive(TOKENS, INNER).to(DTYPE) for _ in range(3))
    # With these factors, dup holds the largest value in the first half of the tokens, and dgate in the second half.
    up[: TOKENS // 2] /= 16
    up[TOKENS // 2 :] *= 4
    up_with_value = up.clone()
    if place is not None:
        up_with_value.view(-1)[place] = da.view(-1)[place] = value
    results = []
    for maxima in ((None, None), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)):
        a, _ = lora_glu_forward(gate, up_with_value, adapters, "silu", maxima[0])
        # The results lie in the memory of the inputs, as in the node.
        dgate, dup = gate.clone(), up.clone()
        finite = adapters._replace(h=torch.cat((_hidden(1.0), _hidden(1.0)), 2))
        lora_glu_backward(da, dgate, dup, finite, dh, "silu", dgate, dup, needs=(True, True, True), maximum=maxima[1])
        results.append([a, dgate, dup])
    assert all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(*results, strict=True))
    for maximum, tensors in zip(maxima, ([a], [dgate, dup]), strict=True):
        largest = maximum.view(torch.float32).item()
        # Devices write NaN with different bits.
        if not math.isnan(value):
            assert maximum.item() == max(int(x.float().abs().view(torch.int32).max()) for x in tensors)
        assert (math.isnan(largest), math.isinf(largest)) == (math.isnan(value), math.isinf(value))


@one_in(1, value=[-1000.0, torch.inf, torch.nan], place={"first": 0, "last": -1})
@pytest.mark.sampled(in_interpreter=5)
def test_the_maximum_has_the_bits_of_the_largest_value(value, place):
    _check(_hidden(1.0), _hidden(1.0), value, place)


def test_elements_outside_of_the_tensors_do_not_count():
    """The first token is infinite. Its tile also has features of zeros, which infinite values of h turn into NaN."""
    _check(_hidden(torch.inf), _hidden(torch.inf), torch.inf, None)
