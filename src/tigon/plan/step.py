"""One training step of a model on meta, counted: bytes at each stage, and what there is to do."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from tigon.plan.engines import Optimizer, Sharded, Whole
from tigon.plan.ledger import Ledger, Work

__all__ = ["Step", "count_step"]


@dataclass(frozen=True)
class Step:
    """What one step takes of one GPU.

    Attributes:
        batch, seq: Sequences, and tokens of each.
        fixed: Bytes between steps: parameters, state of the optimizer, buffers.
        kept: Bytes that the forward pass leaves for backward.
        host: Bytes of pinned memory that it fills.
        peaks: Bytes at most in the forward pass, in backward and in the optimizer's step, everything in them.
        work: What there is to do in each.
    """

    batch: int
    seq: int
    fixed: int
    kept: int
    host: int
    peaks: tuple[int, int, int]
    work: tuple[Work, Work, Work]

    @property
    def peak(self) -> int:
        """Bytes: the most at any moment, as `torch.cuda.max_memory_allocated` has it."""
        return max(self.peaks)


def _backward(loss: Tensor) -> None:
    """`loss.backward()`, which by itself would leave the ledger's modes; layers that run again in it need them."""
    one = torch.ones_like(loss)
    _engine_run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def count_step(model: nn.Module, engine: Whole | Sharded, optimizer: Optimizer, batch: int, seq: int) -> Step:
    """A step of `batch` sequences of `seq` tokens on each GPU, after the first, which makes the optimizer's state.

    Gradients are set to None before it. The model is on meta, in training mode, and left without gradients.
    """
    with Ledger() as ledger:
        engine.start(ledger)
        for buffer in model.buffers():
            ledger.own(buffer)
        ledger.add(optimizer.state)
        fixed, ledger.peak = ledger.live, ledger.live
        try:
            tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
            loss = model(input_ids=tokens, labels=tokens).loss
            kept, forward, there = ledger.live - fixed, ledger.peak, dataclasses.replace(ledger.work)
            ledger.peak = ledger.live
            _backward(loss)
            backward, back = ledger.peak, ledger.work.minus(there)
        finally:
            engine.finish(ledger)
            update = ledger.live + optimizer.temporary  # with the gradients that there are
            for p in model.parameters():
                p.grad = None
    there.exchanged, back.exchanged = engine.exchanged
    update_work = Work(traffic=optimizer.traffic)
    peaks, work = (forward, backward, update), (there, back, update_work)
    return Step(batch, seq, fixed, kept, ledger.host, peaks, work)
