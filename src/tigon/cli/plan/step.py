"""Count one training step of a model on meta: bytes at each stage, arithmetic and memory traffic."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from tigon.cli.plan.engines import OptimizerCosts, Replicated, Sharded
from tigon.cli.plan.ledger import Ledger, Work
from tigon.runtime.compat.autograd import engine_run_backward
from tigon.runtime.compat.names import NAMES_FOR_PLAN, require_names


@dataclass(frozen=True)
class Step:
    """The memory and the work of one step of `batch` sequences on one GPU."""

    batch: int
    seq: int
    # Bytes that are alive between steps (parameters, state of the optimizer, buffers), that the forward pass saves for
    # backward, and that it copies to pinned memory of the host.
    fixed: int
    saved_bytes: int
    host: int
    # The most bytes alive, and the work, in the forward pass, in backward and in the optimizer's step.
    peaks: tuple[int, int, int]
    work: tuple[Work, Work, Work]

    @property
    def peak(self) -> int:
        """Return the most bytes alive at any moment, as `torch.cuda.max_memory_allocated` counts them."""
        return max(self.peaks)


def count_step(model: nn.Module, engine: Replicated | Sharded, optimizer: OptimizerCosts, batch: int, seq: int) -> Step:
    """Count a step of a model on meta. The optimizer's state exists already; gradients are None before and after."""
    require_names("tigon plan", *NAMES_FOR_PLAN)
    with Ledger() as ledger:
        engine.start(ledger)
        for buffer in model.buffers():
            ledger.count(buffer)
        ledger.add(optimizer.state)
        fixed, ledger.peak = ledger.live, ledger.live
        try:
            tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
            loss = model(input_ids=tokens, labels=tokens).loss
            saved_bytes, forward_peak, forward_work = ledger.live - fixed, ledger.peak, dataclasses.replace(ledger.work)
            ledger.peak = ledger.live
            # `loss.backward()` would exit the modes of the ledger, in which layers are recomputed.
            engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            backward_peak, backward_work = ledger.peak, ledger.work.minus(forward_work)
        finally:
            engine.finish(ledger)
            # The gradients are still alive here.
            update_peak = ledger.live + optimizer.temporary
            for p in model.parameters():
                p.grad = None
    forward_work.exchanged, backward_work.exchanged = engine.exchanged
    peaks = forward_peak, backward_peak, update_peak
    work = forward_work, backward_work, Work(traffic=optimizer.traffic)
    return Step(batch, seq, fixed, saved_bytes, ledger.host, peaks, work)
