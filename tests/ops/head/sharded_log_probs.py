"""The comparison of the log-probabilities of a sharded head with those of a whole head, for `test_sharded_head.py`."""

import torch
import torch.distributed as dist
from torch import Tensor

T, H = 13, 8
OPTIONS = {
    "plain": {},
    "every result": {
        "temperature": 0.7, "softcap": 3.0, "logit_scale": 1.5, "return_entropy": True, "return_top1": True,
        "return_mean_logits": True, "return_sum_sq_probs": True, "extra_targets": True,
    },
    "fp32": {"fp32_products": True, "return_sum_sq_probs": True},
    "extra targets": {"extra_targets": True},
}  # fmt: skip


def _tensors(v: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return hidden, weight and bias, targets and extra targets of the whole vocabulary, the same on all ranks."""
    generator = torch.Generator().manual_seed(v)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((T, H), (v, H), (v,))]
    targets, extra = (torch.randint(v, shape, generator=generator) for shape in ((T,), (T, 3)))
    targets[2::4] = -100
    extra[1::5, 1] = -100
    return tensors, targets, extra


def _total(result: Tensor | tuple) -> Tensor:
    """Return a sum of the differentiable results in which every token has another upstream gradient."""
    outputs = [result] if isinstance(result, Tensor) else [y for y in result if y is not None and y.requires_grad]
    return sum((torch.linspace(-0.5, 1.5, y.numel()).view(y.shape) * y).sum() for y in outputs)


def compare_log_probs(v: int, rows: slice, options: dict) -> None:
    import tigon

    tensors, targets, extra = _tensors(v)
    options = options | ({"extra_targets": extra} if "extra_targets" in options else {})
    whole = tigon.linear_log_probs(*tensors[:2], targets, bias=tensors[2], **options)
    dx, dw, db = torch.autograd.grad(_total(whole), tensors)
    hidden, weight, bias = (
        x.detach().clone().requires_grad_() for x in (tensors[0], tensors[1][rows], tensors[2][rows])
    )
    sharded = tigon.linear_log_probs(
        hidden, weight, targets, bias=bias, process_group=dist.group.WORLD, vocab_size=v, **options
    )
    for a, e in zip(*([y] if isinstance(y, Tensor) else y for y in (sharded, whole)), strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=2e-6)
    gradients = torch.autograd.grad(_total(sharded), (hidden, weight, bias))
    for a, e in zip(gradients, (dx, dw[rows], db[rows]), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=5e-6)
