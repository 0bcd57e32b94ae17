"""One training step of a model on meta, counted: bytes at each stage, arithmetic, traffic."""

from dataclasses import dataclass

import torch
from torch import nn

from tigon.plan.engines import Optimizer, Sharded, Whole
from tigon.plan.ledger import Ledger

__all__ = ["Step", "count_step"]


@dataclass(frozen=True)
class Step:
    """What one step takes of one GPU."""

    batch: int
    seq: int
    fixed: int  # bytes between steps: parameters, state of the optimizer, buffers
    kept: int  # bytes that the forward pass leaves for backward
    forward: int  # peaks in bytes, everything in them
    backward: int
    update: int
    products: int  # multiplications and additions
    attention: int
    traffic: int  # bytes read and written by everything else
    exchanged: int  # bytes that a GPU sends to others, and as many that it gets
    to_host: int  # bytes that go to the host, and come back

    @property
    def peak(self) -> int:
        """Bytes: the most at any moment, as `torch.cuda.max_memory_allocated` has it."""
        return max(self.forward, self.backward, self.update)


def count_step(model: nn.Module, engine: Whole | Sharded, optimizer: Optimizer, batch: int, seq: int) -> Step:
    """A step of `batch` sequences of `seq` tokens on each GPU, after the first, which makes the optimizer's state.

    Gradients are set to None before it. The model is on meta, in training mode, and left without gradients.
    """
    with Ledger() as ledger:
        engine.start(ledger)
        for buffer in model.buffers():
            ledger.own(buffer)
        ledger.add(optimizer.state)
        fixed = ledger.live
        tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
        loss = model(input_ids=tokens, labels=tokens).loss
        kept, forward = ledger.live - fixed, ledger.peak
        ledger.peak = ledger.live
        loss.backward()
        backward = ledger.peak
        engine.finish(ledger)
        del loss
        update = ledger.live + optimizer.temporary
        for p in model.parameters():
            p.grad = None
    return Step(
        batch, seq, fixed, kept, forward, backward, update, ledger.products, ledger.attention,
        ledger.traffic + optimizer.traffic, engine.exchanged, ledger.to_host,
    )  # fmt: skip
