"""Count the bytes that an engine and an optimizer add to a step: shards, gathered units, buckets and states."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tigon.cli.plan.ledger import Ledger
from tigon.hf.transformers_private import layer_classes
from tigon.ops.optim.compact_states import MIN_QUANTISED
from tigon.ops.optim.formats import QUANT_BLOCK
from tigon.runtime.compat.autograd import storage_id
from tigon.runtime.device import cdiv

STRATEGIES = ("single", "ddp", "fsdp")
# Bytes of each moment, and of the master weight of a parameter that is not in fp32, in the formats of `tigon.AdamW`.
COMPACT_OPTIMIZERS = {
    "adamw-8bit": (1, 0),
    "adamw-8bit+24": (1, 1),
    "adamw-8bit+32": (1, 4),
    "adamw-fp32": (4, 0),
    "adamw-fp32+24": (4, 1),
    "adamw-fp32+32": (4, 4),
}
OPTIMIZERS = ("adamw", "adamw-foreach", *COMPACT_OPTIMIZERS, "sgd", "none")


@dataclass(frozen=True)
class OptimizerCosts:
    """Bytes of an optimizer on one GPU: between steps, only in its step, and read and written by its step."""

    state: int
    temporary: int
    traffic: int


def optimizer_costs(name: str, sizes: list[int], dtype: torch.dtype) -> OptimizerCosts:
    """Return the costs of an optimizer for parameters and gradients of these sizes (elements on one GPU) and dtype."""
    n, itemsize = sum(sizes), dtype.itemsize
    if name == "none":
        return OptimizerCosts(0, 0, 0)
    # The fused kernel reads the parameter, its gradient and two moments, and writes all of them but the gradient.
    if name == "adamw":
        return OptimizerCosts(2 * n * itemsize, 0, 7 * n * itemsize)
    if name in COMPACT_OPTIMIZERS:
        moment_bytes, master_bytes = COMPACT_OPTIMIZERS[name]
        state = 0
        for size in sizes:
            # Codes have one fp32 scale for each block. Small parameters have fp32 moments.
            is_quantised = moment_bytes == 1 and size >= MIN_QUANTISED
            state += 2 * (size + 4 * cdiv(size, QUANT_BLOCK)) if is_quantised else 8 * size
            state += master_bytes * size if dtype != torch.float32 else 0
        return OptimizerCosts(state, 0, 3 * n * itemsize + 2 * state)
    if name == "sgd":
        return OptimizerCosts(0, 0, 2 * n * itemsize)
    # Each operation of the loop over lists of tensors reads and writes them, and one list is temporary.
    return OptimizerCosts(2 * n * itemsize, n * itemsize, 13 * n * itemsize)


class Replicated:
    """One GPU, or DDP: every GPU holds all parameters and gradients. DDP also needs buckets to reduce gradients."""

    def __init__(self, model: nn.Module, gpus: int) -> None:
        self.parameters = list(model.parameters())
        gradient_bytes = sum(p.nbytes for p in self.parameters if p.requires_grad)
        self.buckets = gradient_bytes if gpus > 1 else 0
        # Bytes in forward and in backward. A ring all-reduce sends and receives each byte about twice.
        self.exchanged = 0, 2 * gradient_bytes * (gpus - 1) // gpus

    def start(self, ledger: Ledger) -> None:
        """Count the bytes that are allocated before a step."""
        for p in self.parameters:
            ledger.count(p)
        ledger.add(self.buckets)

    def finish(self, ledger: Ledger) -> None:
        """End the count of a step, after backward."""


class _Unit:
    """Parameters that are gathered together. With `stays_gathered`, gathering another unit does not free this one."""

    def __init__(self, parameters: list[nn.Parameter], stays_gathered: bool) -> None:
        self.parameters, self.stays_gathered = parameters, stays_gathered
        self.nbytes = sum(p.nbytes for p in parameters)
        self.trainable = [p for p in parameters if p.requires_grad]
        # The number of gradients that backward has not computed yet.
        self.pending = len(self.trainable)


class Sharded:
    """FSDP2 with the units of accelerate: each layer, the embedding, and the last norm with the head. A unit is
    gathered when an operation reads one of its parameters, and freed when another unit is gathered, except the unit of
    the head and that of the parameters outside of all other units. The gradients of a unit are whole until all are
    computed; then they are reduced and scattered."""

    def __init__(self, model: nn.Module, gpus: int, dtype: torch.dtype) -> None:
        """Divide the model into units. The model has the dtype of its arithmetic. `dtype` is that of the shards.
        Parameters of a wider dtype, such as fp32 adapters of a bf16 model, and weights of 4 bits keep their dtype."""
        self.gpus, self.dtype = gpus, dtype
        # Each parameter belongs to the first unit that contains it.
        assigned_ids: set[int] = set()

        def make_unit(*modules: nn.Module | None, stays_gathered: bool = False) -> _Unit:
            parameters = [p for module in modules if module is not None for p in module.parameters()]
            new_parameters = [p for p in dict.fromkeys(parameters) if id(p) not in assigned_ids]
            assigned_ids.update(map(id, new_parameters))
            return _Unit(new_parameters, stays_gathered)

        classes = layer_classes(model)
        layers = [m for m in model.modules() if type(m).__name__ in classes]
        embedding, head = (getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
        is_tied = head is not None and embedding is not None and head.weight is embedding.weight
        norm = next((m for m in reversed(list(model.modules())) if "Norm" in type(m).__name__), None)
        units = [make_unit(layer) for layer in layers]
        units.append(make_unit(norm, head, embedding if is_tied else None, stays_gathered=True))
        units += [make_unit(embedding), make_unit(model, stays_gathered=True)]
        self.units = [unit for unit in units if unit.parameters]
        self.units_by_storage: dict[int, _Unit] = {}
        # The bytes that each gathered unit takes now.
        self.gathered: dict[_Unit, int] = {}
        # The bytes of the buffer whose gradients are being reduced and scattered.
        self.scattering = 0
        # Forward and backward gather the parameters, and backward scatters the gradients.
        parameters = [p for unit in self.units for p in unit.parameters]
        total, gradient_bytes = sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if p.requires_grad)
        self.exchanged = total * (gpus - 1) // gpus, (total + gradient_bytes) * (gpus - 1) // gpus

    def _shard_size(self, parameters: list[nn.Parameter]) -> int:
        dtype_of = lambda p: torch.promote_types(p.dtype, self.dtype) if p.is_floating_point() else p.dtype
        return sum(-(-p.numel() // self.gpus) * dtype_of(p).itemsize for p in parameters)

    def start(self, ledger: Ledger) -> None:
        """Count the shards, and let the ledger report which parameters are read."""
        self.ledger, self.hooks, ledger.shards = ledger, [], self.gpus
        for unit in self.units:
            ledger.add(self._shard_size(unit.parameters))
            unit.pending = len(unit.trainable)
            for p in unit.parameters:
                ledger.exclude(p)
                self.units_by_storage[storage_id(p.untyped_storage())] = unit
            for p in unit.trainable:
                self.hooks.append(p.register_post_accumulate_grad_hook(lambda _, u=unit: self._finish_gradient(u)))
        self.gathered, self.scattering = {}, 0
        ledger.on_read = self._gather

    def _gather(self, x: Tensor) -> None:
        """Gather the unit of a parameter that an operation reads, and free the other units."""
        unit = self.units_by_storage.get(storage_id(x.untyped_storage())) if x.is_meta else None
        if unit is None or unit in self.gathered:
            return
        # Count the gathered buffer and the parameters that are copied out of it. The previous unit is still allocated.
        self.ledger.add(2 * unit.nbytes)
        self.gathered[unit] = 2 * unit.nbytes
        for other in [u for u in self.gathered if u is not unit]:
            remaining = other.nbytes if other.stays_gathered else 0
            self.ledger.add(remaining - self.gathered[other])
            self.gathered[other] = remaining
            if not remaining:
                del self.gathered[other]

    def _finish_gradient(self, unit: _Unit) -> None:
        """Note that a gradient of a unit is complete. After the last one, reduce and scatter them."""
        unit.pending -= 1
        if unit.pending:
            return
        # The gradients are copied into a buffer that is sent. The buffer of the previous unit is still in use.
        buffer = sum(p.nbytes for p in unit.trainable)
        self.ledger.add(buffer + self._shard_size(unit.trainable))
        for p in unit.trainable:
            p.grad = None
        self.ledger.add(-self.scattering)
        self.scattering = buffer

    def finish(self, ledger: Ledger) -> None:
        """Free the gathered units and the buffers in use."""
        ledger.add(-self.scattering - sum(self.gathered.values()))
        self.gathered, self.scattering, ledger.on_read = {}, 0, None
        for hook in self.hooks:
            hook.remove()
