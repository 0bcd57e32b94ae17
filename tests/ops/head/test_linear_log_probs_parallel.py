"""Log-probabilities of a vocabulary that is sharded over processes equal those of the whole vocabulary.

As a script, this file runs one rank: python test_linear_log_probs_parallel.py STORE
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from interpreter import speed_up_the_interpreter
from ranks import LIMIT, leave, run_ranks

T, H, K = 13, 8, 3
OPTIONS = {
    "plain": {},
    "every result": {
        "temperature": 0.7, "softcap": 3.0, "logit_scale": 1.5, "return_entropy": True, "return_top1": True,
        "return_mean_logits": True, "return_sum_sq_probs": True, "extra_targets": True,
    },
    "fp32": {"fp32_products": True, "return_sum_sq_probs": True},
    "extra targets": {"extra_targets": True},
}  # fmt: skip


@pytest.mark.thorough_in_interpreter
def test_a_sharded_head_has_the_results_of_the_whole_head():
    for output in run_ranks(__file__):
        assert output.splitlines()[-1] == "all options passed", output


def _tensors(v: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return hidden, weight and bias, targets and extra targets of the whole vocabulary, the same on all ranks."""
    generator = torch.Generator().manual_seed(v)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((T, H), (v, H), (v,))]
    targets, extra = (torch.randint(v, shape, generator=generator) for shape in ((T,), (T, K)))
    targets[2::4] = -100
    extra[1::5, 1] = -100
    return tensors, targets, extra


def _total(result: Tensor | tuple) -> Tensor:
    """Return a sum of the differentiable results in which every token has another upstream gradient."""
    outputs = [result] if isinstance(result, Tensor) else [y for y in result if y is not None and y.requires_grad]
    return sum((torch.linspace(-0.5, 1.5, y.numel()).view(y.shape) * y).sum() for y in outputs)


def compare(v: int, options: dict, rank: int, ranks: int) -> None:
    import tigon

    tensors, targets, extra = _tensors(v)
    options = options | ({"extra_targets": extra} if "extra_targets" in options else {})
    length = -(-v // ranks)
    rows = slice(rank * length, min((rank + 1) * length, v))
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


def every_option(rank: int, ranks: int) -> None:
    from tigon.ops.head.chunks import ChunkConfig
    from tigon.ops.head.log_prob_chunks import SlabConfig
    from tigon.runtime.tuning import tuned

    # The last vocabulary gives the last rank no row.
    for v in (24, 9, 1):
        for options in OPTIONS.values():
            with tuned(ChunkConfig, tokens=5), tuned(SlabConfig, columns=5, block_tokens=4):
                compare(v, options, rank, ranks)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        speed_up_the_interpreter()
    rank, ranks, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
    torch.set_num_threads(1)
    # In this mode, memory that was not written holds NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=LIMIT)
    every_option(rank, ranks)
    print("all options passed", flush=True)
    dist.destroy_process_group()
    leave()
