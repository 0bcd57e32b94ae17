"""dW is a sum over chunks, in its own dtype, or in fp32 in the memory of its half-precision result."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from op_cases import DEVICE, one_in
from tigon.ops.head import gradients as weight_gradient
from tigon.ops.head.gradients import WeightGradient

pytestmark = pytest.mark.no_interpreter("torch computes all products of CPU tensors.")

BF16 = torch.bfloat16

# The sizes V give upper halves of 0 rows (V < 128), of up to 256 rows (which are rounded from a copy), and of about 256
# rows times a power of two, where one more part begins. With an odd V the lower half has one row more.
SIZES = [1, 127, 128, 129, 384, 511, 512, 513, 640, 1024, 1025, 1151]
SIZES += [n + more for n in (2048, 8192) for more in (-1, 0, 129)]


def _parts(v: int, h: int, chunks: int = 3, dtype: torch.dtype = BF16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return integers, so that fp32 sums are exact in any order, which are so large that half precision rounds them."""
    generator = torch.Generator().manual_seed(v * 7 + h)
    draw = lambda *shape: torch.randint(-64, 65, shape, generator=generator).to(DEVICE, dtype)
    return [(draw(5 + i, v), draw(5 + i, h)) for i in range(chunks)]


def _expected_sum(parts) -> torch.Tensor:
    return sum(dlogits.float().t() @ x.float() for dlogits, x in parts)


def _add_parts(weight: torch.Tensor, in_fp32: bool, parts, buffer: torch.Tensor | None = None) -> torch.Tensor:
    dw = WeightGradient(weight, in_fp32, buffer)
    for dlogits, x in parts:
        dw.add(dlogits, x)
    return dw.finish()


class _Copies(TorchDispatchMode):
    """A mode that fails if a copy reads memory that it writes, because a GPU runs the parts of a copy in any order."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket._qualified_op_name == "aten::copy_":
            to, source = args[:2]
            (a, b), (c, d) = ((x.data_ptr(), x.data_ptr() + x.nbytes) for x in (to, source))
            assert to.numel() == 0 or b <= c or d <= a, "a copy overlaps itself"
        return function(*args, **(kwargs or {}))


@one_in(1, h=[1, 8], v=list(SIZES))
def test_fp32_sum_is_rounded_once(v, h):
    parts, weight = _parts(v, h), torch.empty(v, h, dtype=BF16, device=DEVICE)
    expected = _expected_sum(parts)
    assert v * h < 10 or (expected.to(BF16) != expected).any(), "the sum must need a rounding"
    with _Copies():
        assert torch.equal(_add_parts(weight, True, parts), expected.to(BF16))


@one_in(1, in_fp32={"": False, "in fp32": True}, v=[7, 640, 641])
def test_empty_sum_is_zero_or_the_buffer(v, in_fp32):
    weight = torch.empty(v, 3, dtype=BF16, device=DEVICE)
    assert (_add_parts(weight, in_fp32, []) == 0).all()
    buffer = torch.ones(v, 3, dtype=torch.float32, device=DEVICE)
    assert _add_parts(weight, in_fp32, [], buffer) is buffer
    assert (buffer == 1).all()


@pytest.mark.parametrize("slab", [1, 100, 2**20], ids=lambda n: f"slabs of {n} bytes")
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", [BF16, torch.float16], ids=str)
def test_half_precision_products_are_not_rounded_in_an_fp32_sum(kind, autocast, slab, monkeypatch):
    """This is the gradient of an fp32 weight under autocast, and Megatron's main_grad."""
    parts, weight = _parts(70, 5, dtype=kind), torch.empty(70, 5, device=DEVICE)
    expected = _expected_sum(parts)
    monkeypatch.setattr(weight_gradient, "SLAB_BYTES", slab)
    with torch.autocast(DEVICE, BF16, enabled=autocast):
        assert torch.equal(_add_parts(weight, False, parts), expected)
        buffer = torch.full((70, 5), 3.0, device=DEVICE)
        assert _add_parts(weight, False, parts, buffer) is buffer
    assert torch.equal(buffer, expected + 3.0)


@pytest.mark.parametrize("buffer_dtype", [torch.float64, torch.float32], ids=str)
def test_fp64_weight_may_accumulate_in_fp32_or_fp64(buffer_dtype):
    """With accumulate_grad the buffer is fp64, or an fp32 `main_grad`. Both are at least as fine as requested."""
    x, weight = (torch.ones(n, 8, dtype=torch.float64, device=DEVICE) for n in (4, 257))
    weight.requires_grad_()
    target = torch.arange(4, device=DEVICE)
    (expected,) = torch.autograd.grad(tigon.linear_cross_entropy(x, weight, target), weight)
    if buffer_dtype == torch.float64:
        weight.grad = torch.ones_like(weight)
    else:
        weight.main_grad = torch.ones(257, 8, device=DEVICE)
    loss = tigon.linear_cross_entropy(x, weight, target, acc_dtype=torch.float32, accumulate_grad=True)
    loss.backward()
    total = weight.grad if buffer_dtype == torch.float64 else weight.main_grad
    torch.testing.assert_close(total.double(), 1 + expected, rtol=1e-6, atol=1e-6)
