"""Weights of 4 bits are dequantised to exactly the values that bitsandbytes computes."""

import pytest
import torch

from op_cases import DEVICE, one_in
from tigon.ops.adapters.four_bit import FourBitWeight, QuantisedScales, dequantise

pytestmark = pytest.mark.kernels

# The last byte of an odd number of weights is half empty, and the last block has fewer weights.
SHAPES = {"one block": (8, 8), "several programs": (40, 264), "odd": (37, 59)}


def _quantise(shape: tuple[int, int], block: int, quant_type: str, is_nested: bool, dtype: torch.dtype) -> tuple:
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return functional.quantize_4bit(dense, blocksize=block, quant_type=quant_type, compress_statistics=is_nested)


def _four_bit_weight(packed: torch.Tensor, state: object) -> FourBitWeight:
    quantised = None
    if state.nested:
        quantised = QuantisedScales(state.state2.code, state.state2.absmax, state.offset, state.state2.blocksize)
    return FourBitWeight(packed, state.code, state.absmax, state.blocksize, quantised, state.shape, state.dtype)


def _dequantise_reference(weight: FourBitWeight) -> torch.Tensor:
    """Return the dense weight [O, I] by operations of torch."""
    packed, numel = weight.packed.reshape(-1), weight.shape.numel()
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1)[:numel]
    scales, quantised = weight.scales, weight.quantised_scales
    if quantised is not None:
        scales_of_scales = quantised.scales.repeat_interleave(quantised.block)[: len(scales)]
        scales = quantised.table[scales.int()] * scales_of_scales + quantised.offset
    values = weight.table[codes.int()] * scales.repeat_interleave(weight.block)[:numel]
    return values.to(weight.dtype).view(weight.shape)


@one_in(1, shape=SHAPES, is_nested={"scales in fp32": False, "double quantisation": True}, quant_type=["nf4", "fp4"])
@pytest.mark.parametrize(("dtype", "block"), [(torch.bfloat16, 64), (torch.float16, 4096), (torch.float32, 128)])
@pytest.mark.sampled(in_interpreter=13)
def test_values_are_those_of_bitsandbytes(shape, is_nested, quant_type, dtype, block):
    from bitsandbytes.functional import dequantize_4bit

    packed, state = _quantise(shape, block, quant_type, is_nested, dtype)
    expected = dequantize_4bit(packed, state)
    weight = _four_bit_weight(packed, state)
    actual = dequantise(weight)
    assert torch.equal(actual, _dequantise_reference(weight))
    assert torch.equal(actual, expected)
