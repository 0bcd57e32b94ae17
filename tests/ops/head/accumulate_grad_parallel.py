"""Checks for `tests/ops/test_two_ranks.py`: `accumulate_grad=True` has the gradients of autograd in DDP and FSDP2."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

T, H = 26, 8


def _close(name: str, actual: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    size = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6 * size, msg=lambda m: f"{name}: {m}")


class _Head(nn.Linear):
    """A head whose forward returns its loss."""

    # None stands for the definition of the loss in torch.
    accumulate: bool | None = False

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        import tigon
        from tigon.ops.head.linear_cross_entropy import linear_cross_entropy_reference

        if self.accumulate is None:
            return linear_cross_entropy_reference(hidden, self.weight, target, linear_bias=self.bias)
        assert (self.weight.grad is not None) >= self.requires_gradient_buffer
        return tigon.linear_cross_entropy(
            hidden, self.weight, target, linear_bias=self.bias, accumulate_grad=self.accumulate
        )

    # True if the weight must have a gradient to which dW can be added.
    requires_gradient_buffer = False


class _Model(nn.Module):
    def __init__(self, accumulate: bool | None, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, H), _Head(H, 50, bias=not tied)
        self.head.accumulate = accumulate
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh(), target)


def _train(model: nn.Module, skip_reduction: Callable, accumulates: bool) -> dict[str, Tensor]:
    """Run two steps of three micro-batches each, and return the gradients of the last step, reduced over the ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    inner = getattr(model, "module", model)
    for _ in range(2):
        model.zero_grad()
        inner.head.requires_gradient_buffer = False
        for i in range(3):
            tokens, target = (torch.randint(50, (T,), generator=generator) for _ in range(2))
            target[::5] = -100
            with skip_reduction(i < 2):
                model(tokens, target).backward()
            inner.head.requires_gradient_buffer = accumulates
    full = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    return {name: full(p.grad) for name, p in inner.named_parameters()}


def under_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    # Views of buckets, unused parameters, tied embeddings.
    for as_view, unused, tied in ((False, False, False), (True, False, True), (True, True, False), (False, True, True)):
        gradients_by_mode = []
        for accumulate in (None, False, True):
            model = DistributedDataParallel(
                _Model(accumulate, tied), gradient_as_bucket_view=as_view, find_unused_parameters=unused
            )
            skip_reduction = lambda off, m=model: m.no_sync() if off else contextlib.nullcontext()
            gradients_by_mode.append(_train(model, skip_reduction, accumulates=True))
        for name, value in gradients_by_mode[0].items():
            for actual in gradients_by_mode[1:]:
                _close(f"{name}, {as_view=}, {tied=}", actual[name], value)
    # The gradients are the same on every rank.
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, gradients_by_mode[1]["embedding.weight"])
    assert all(torch.equal(other, gathered[0]) for other in gathered)


def under_fsdp2() -> None:
    """In the forward of the module the weight is whole, and has a gradient until the gradients are reduced."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # With the second policy FSDP2 sums the gradients of the micro-batches in fp32 in its own buffer.
    for policy, accumulates in ((None, True), (wide, False)):
        gradients_by_mode = []
        for accumulate in (None, False, True):
            model = _Model(accumulate)
            for module in (model.head, model):
                fully_shard(module, **({} if policy is None else {"mp_policy": policy}))

            @contextlib.contextmanager
            def skip_reduction(off: bool, model: nn.Module = model):
                model.set_requires_gradient_sync(not off)
                yield

            gradients_by_mode.append(_train(model, skip_reduction, accumulates))
        for name, value in gradients_by_mode[0].items():
            _close(f"{name}, {accumulates=}", gradients_by_mode[1][name], value, rtol=1e-5 if policy is None else 0.02)
            _close(f"{name}, {accumulates=}", gradients_by_mode[2][name], gradients_by_mode[1][name])
