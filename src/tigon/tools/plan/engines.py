"""Count the bytes that an engine and an optimizer add to a step: shards, gathered units, buckets and states."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tigon.tools.plan.ledger import Ledger

__all__ = ["OPTIMIZERS", "STRATEGIES", "Optimizer", "Sharded", "Whole", "optimizer_costs"]

STRATEGIES = ("single", "ddp", "fsdp")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-8bit", "sgd", "none")


@dataclass(frozen=True)
class Optimizer:
    """Bytes of an optimizer on one GPU: kept between steps, allocated only in its step, and moved by its step."""

    state: int
    temporary: int
    traffic: int


def optimizer_costs(name: str, sizes: list[int], dtype: torch.dtype) -> Optimizer:
    """Return the costs of an optimizer for parameters and gradients of these sizes (elements on one GPU) and dtype."""
    n, itemsize = sum(sizes), dtype.itemsize
    if name == "none":
        return Optimizer(0, 0, 0)
    if name == "adamw":  # fused: reads the parameter, its gradient and two moments, writes all but the gradient
        return Optimizer(2 * n * itemsize, 0, 7 * n * itemsize)
    if name == "adamw-8bit":  # moments of one byte, and an fp32 scale for every 256 of each
        return Optimizer(2 * n + n // 32, 0, 3 * n * itemsize + 4 * n)
    make = {
        "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, foreach=True),
    }[name]
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size in sizes]
    for p in parameters:
        p.grad = torch.empty_like(p)
    with Ledger() as ledger:
        for p in parameters:
            ledger.leave_out(p)
            ledger.leave_out(p.grad)
        optimizer = make(parameters)
        optimizer.step()  # makes the state
        state, traffic = ledger.live, ledger.work.traffic
        ledger.peak = ledger.live
        optimizer.step()
        return Optimizer(state, ledger.peak - ledger.live, ledger.work.traffic - traffic)


class Whole:
    """Every GPU holds all parameters and gradients. With DDP it also holds buckets in which gradients are reduced."""

    def __init__(self, model: nn.Module, gpus: int) -> None:
        self.parameters = list(model.parameters())
        trained = sum(p.nbytes for p in self.parameters if p.requires_grad)
        self.buckets = trained if gpus > 1 else 0
        # Bytes in forward and in backward. A ring all-reduce sends and receives each byte about twice.
        self.exchanged = 0, 2 * trained * (gpus - 1) // gpus

    def start(self, ledger: Ledger) -> None:
        """Count the bytes that are there before a step."""
        for p in self.parameters:
            ledger.own(p)
        ledger.add(self.buckets)

    def finish(self, ledger: Ledger) -> None:
        """End the count of a step, after backward."""


class _Unit:
    """Parameters that are gathered together."""

    def __init__(self, parameters: list[nn.Parameter], stays: bool) -> None:
        self.parameters, self.stays = parameters, stays
        self.nbytes = sum(p.nbytes for p in parameters)
        self.trained = [p for p in parameters if p.requires_grad]
        self.waiting = len(self.trained)


class Sharded:
    """FSDP2 as accelerate sets it up: each layer is a unit, the embedding one, the last norm and the head one.

    A unit is gathered when an operation reads one of its parameters, and freed when another unit is gathered, except
    the unit of the head. The gradients of a unit are whole until all are computed; then they are reduced and scattered.
    """

    def __init__(self, model: nn.Module, gpus: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the shards of parameters and gradients. The model has the dtype of its arithmetic."""
        self.gpus, self.itemsize = gpus, dtype.itemsize
        taken: set[int] = set()

        def unit(*modules: nn.Module | None, stays: bool = False) -> _Unit:
            every = [p for module in modules if module is not None for p in module.parameters()]
            own = [p for p in dict.fromkeys(every) if id(p) not in taken]
            taken.update(map(id, own))
            return _Unit(own, stays)

        classes = set(getattr(model, "_no_split_modules", None) or ())
        layers = [m for m in model.modules() if type(m).__name__ in classes]
        embedding, head = (getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        norm = next((m for m in reversed(list(model.modules())) if "Norm" in type(m).__name__), None)
        units = [unit(layer) for layer in layers]
        units.append(unit(norm, head, embedding if tied else None, stays=True))
        units += [unit(embedding), unit(model, stays=True)]
        self.units = [u for u in units if u.parameters]
        self.unit_of: dict[int, _Unit] = {}
        self.gathered: dict[_Unit, int] = {}
        self.scattering = 0
        # Forward and backward gather the parameters, and backward scatters the gradients.
        every = [p for u in self.units for p in u.parameters]
        total, trained = sum(p.nbytes for p in every), sum(p.nbytes for p in every if p.requires_grad)
        self.exchanged = total * (gpus - 1) // gpus, (total + trained) * (gpus - 1) // gpus

    def _shard(self, parameters: list[nn.Parameter]) -> int:
        return sum(-(-p.numel() // self.gpus) for p in parameters) * self.itemsize

    def start(self, ledger: Ledger) -> None:
        """Count the shards, and begin to watch which units are gathered."""
        self.ledger, self.hooks = ledger, []
        for unit in self.units:
            ledger.add(self._shard(unit.parameters))
            unit.waiting = len(unit.trained)
            for p in unit.parameters:
                ledger.leave_out(p)
                self.unit_of[p.untyped_storage()._cdata] = unit
            for p in unit.trained:
                self.hooks.append(p.register_post_accumulate_grad_hook(lambda _, u=unit: self._arrived(u)))
        self.gathered, self.scattering = {}, 0
        ledger.watch = self._taken

    def _taken(self, x: Tensor) -> None:
        unit = self.unit_of.get(x.untyped_storage()._cdata) if x.is_meta else None
        if unit is None or unit in self.gathered:
            return
        # This counts the gathered buffer and the parameters copied out of it, while the last unit is still there.
        self.ledger.add(2 * unit.nbytes)
        self.gathered[unit] = 2 * unit.nbytes
        for other in [u for u in self.gathered if u is not unit]:
            left = other.nbytes if other.stays else 0
            self.ledger.add(left - self.gathered[other])
            self.gathered[other] = left
            if not left:
                del self.gathered[other]

    def _arrived(self, unit: _Unit) -> None:
        unit.waiting -= 1
        if unit.waiting:
            return
        # The gradients are copied into a buffer that is sent, while the buffer of the last unit is still in use.
        sent = sum(p.nbytes for p in unit.trained)
        self.ledger.add(sent + self._shard(unit.trained))
        for p in unit.trained:
            p.grad = None
        self.ledger.add(-self.scattering)
        self.scattering = sent

    def finish(self, ledger: Ledger) -> None:
        """Free the gathered units and the buffers in use."""
        ledger.add(-self.scattering - sum(self.gathered.values()))
        self.gathered, self.scattering, ledger.watch = {}, 0, None
        for hook in self.hooks:
            hook.remove()
