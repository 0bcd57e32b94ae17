import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_refused, one_in

# One token, fewer tokens than taps, and sizes that fill no tile.
SHAPES = [(1, 1, 12), (2, 3, 40), (3, 33, 17), (1, 70, 264)]


def stock(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu") -> Tensor:
    """Compute what transformers computes without other packages, for x of shape [B, C, T]."""
    taps = weight.shape[-1]
    y = F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=len(weight))[..., : x.shape[-1]]
    return y if activation is None else F.silu(y)


def _inputs(
    shape: tuple[int, ...], taps: int, dtype: torch.dtype = torch.float32, layout: str = "last"
) -> list[Tensor]:
    """Return x, weight and bias. The layouts "last" and "wide" are [B, T, C], "first" and "dense time" are [B, C, T].

    "wide" is a view of a wider tensor, and "first" a view of a tensor [B, T, C].
    """
    generator = torch.Generator().manual_seed(sum(shape) + taps)
    draw = lambda *sizes: torch.randn(sizes, generator=generator).to(DEVICE, dtype)
    b, t, c = shape
    views = {
        "last": lambda: draw(b, t, c),
        "wide": lambda: draw(b, t, c + 8)[..., 3 : c + 3],
        "first": lambda: draw(b, t, c).transpose(1, 2),
        "dense time": lambda: draw(b, c, t),
    }
    return [y.requires_grad_() for y in (views[layout](), draw(c, taps) * taps**-0.5, draw(c))]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@one_in(
    12, shape=SHAPES, dtype=DTYPES, taps=[2, 4, 8, 3], layout=["last", "wide", "first", "dense time"],
    activation=["silu", None],
)  # fmt: skip
def test_accuracy(shape, dtype, taps, layout, activation, bias):
    is_last = layout in ("last", "wide")
    tensors = _inputs(shape, taps, dtype, layout)[: 2 + bias]

    def eager(x: Tensor, *others: Tensor) -> Tensor:
        y = stock(x.transpose(1, 2) if is_last else x, *others, activation=activation)
        return y.transpose(1, 2) if is_last else y

    assert_as_accurate_as_eager(
        lambda *t: tigon.causal_conv1d(*t, activation=activation, channels_last=is_last), eager, tensors
    )


def test_refusals():
    x, weight, bias = (t.detach() for t in _inputs((1, 5, 8), 4))
    bounds, positions = torch.tensor([0, 5], device=DEVICE), torch.arange(5, device=DEVICE)[None]
    changes = {
        r"x must have shape \[B, T, C\], got \(5, 8\)": {"x": x[0]},
        r"x must have at least one channel, got \[B, T, C\] = \(1, 5, 0\)": {"x": x[..., :0]},
        r"weight must have shape \(8, W\) or \(8, 1, W\), got \(7, 4\)": {"weight": weight[:7]},
        "weight must have 2 to 8 taps W, got 1": {"weight": weight[:, :1]},
        r"bias must have shape \(8,\), got \(7,\)": {"bias": bias[:7]},
        "activation must be one of 'silu', 'swish', None, got 'gelu'": {"activation": "gelu"},
        "channels_last must be a bool": {"channels_last": 1},
        "cu_seqlens must be an int64 or int32 tensor": {"cu_seqlens": bounds.float()},
        r"cu_seqlens must have shape \(N \+ 1,\), got \(1,\)": {"cu_seqlens": bounds[:1]},
        r"cu_seqlens need a batch of 1, got x \(2, 5, 8\)": {"x": x.expand(2, 5, 8), "cu_seqlens": bounds},
        r"position_ids must have shape \(1 or 1, 5\), got \(1, 4\)": {"position_ids": positions[:, :4]},
        "cu_seqlens and position_ids must not be given together": {"cu_seqlens": bounds, "position_ids": positions},
    }
    assert_refused(tigon.causal_conv1d, {"x": x, "weight": weight, "bias": bias}, changes)
