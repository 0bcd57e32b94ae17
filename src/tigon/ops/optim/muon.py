"""Muon, whose orthogonalisation multiplies small symmetric matrices in batches, and AdamW for all other parameters."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.ops.optim import compact_states
from tigon.ops.optim.adamw import AdamW, check_number, prefixed_errors
from tigon.ops.optim.dtensors import is_dtensor, local_part
from tigon.ops.optim.muon_kernels import (
    Matrix,
    apply_update,
    compute_momentum,
    momentum_reference,
    table_of,
    update_reference,
)
from tigon.ops.optim.muon_shards import RowShard, orthogonalise_shards, shard_of
from tigon.ops.optim.orthogonalise import Coefficients, orthogonalise
from tigon.ops.optim.tensor_table import TensorTable, are_addressable
from tigon.runtime import checks
from tigon.runtime.compat.graphs import disable_dynamo
from tigon.runtime.device import cdiv
from tigon.runtime.launch import on_device

# The largest size of the input of one orthogonalisation, which is a batch of matrices of one shape. A batch has a few
# buffers of this size. A single matrix may be larger.
BATCH_BYTES = 2**29

_MUON_OPTIONS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")

# Torch has this class since 2.9. The classes have the same options and states.
_TorchMuon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)


class _LocalMatrix(NamedTuple):
    """A matrix of this rank, or its rows of a sharded one."""

    matrix: Matrix
    shard: RowShard | None
    shape: tuple[int, int]  # The shape of the whole matrix


class Muon(_TorchMuon):
    """`torch.optim.Muon` with the same arguments, states and state dict, and a faster step. It may contain AdamW too.

    Muon is for the matrices of hidden layers. Embeddings, the head, norms and biases need another optimizer. Groups
    with `use_muon=False` hold them, and `tigon.AdamW` takes their steps. So one optimizer trains the whole model, as
    the Trainer, schedulers and accelerate expect it. `tigon.muon_groups(model)` makes the groups.

    Two kernels pass over the memory of all matrices: one computes the momentum, the other one the update with its
    weight decay. In between, matrices of one shape are orthogonalised in batches by products in bf16 and fp16 with sums
    in fp32. The products are those of the Gram form of Newton-Schulz iterations, and a kernel computes one half of each
    symmetric result. `ops/optim/orthogonalise.py` has the formulas and the errors. The host never waits for the device.

    On the CPU, the step has the operations of `torch.optim.Muon`. If FSDP2 shards matrices over ranks, each rank
    orthogonalises some of them as a whole.

    Args:
        params: Parameters of two dimensions, or of three dimensions [E, m, n], which are E matrices, such as weights of
            experts. Groups with `use_muon=False` may contain any parameters, and the options of AdamW.
        lr: The learning rate, a number or a tensor of one element.
        weight_decay: The decoupled weight decay.
        momentum: The factor of the momentum, in [0, 1].
        nesterov: Use Nesterov's momentum.
        ns_coefficients: The coefficients (a, b, c) of all steps of the orthogonalisation, or one triple for each step.
        eps: The smallest norm by which a matrix is divided.
        ns_steps: The number of steps of the orthogonalisation, less than 100.
        adjust_lr_fn: "original" (or None) multiplies the learning rate of a matrix [m, n] by sqrt(max(1, m / n)), and
            "match_rms_adamw" by 0.2 sqrt(max(m, n)). With the latter, learning rates and weight decays that were tuned
            for AdamW can be used.

    Raises:
        ValueError, TypeError: A parameter has another number of dimensions, a DTensor is sharded in another way, or an
            option has a wrong type or value.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Liu et al., "Muon is
    Scalable for LLM Training", arXiv:2502.16982.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> optimizer = tigon.Muon(tigon.muon_groups(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 1, 1]
        >>> model(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, ns_coefficients: Sequence[float] | Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7, ns_steps: int = 5, *, adjust_lr_fn: str | None = None,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        _check_options(defaults)
        with prefixed_errors("Muon"):
            # The constructor of torch's Muon refuses groups of AdamW and matrices of experts.
            torch.optim.Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options; see `torch.optim.Optimizer.add_param_group`."""
        is_muon = True
        if isinstance(param_group, dict):
            is_muon = param_group.get("use_muon", True)
            checks.flag("Muon", use_muon=is_muon)
            if not is_muon:
                shared = {name: self.defaults[name] for name in ("lr", "weight_decay")}
                for name, value in {**_adamw_defaults(), **shared}.items():
                    param_group.setdefault(name, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if is_muon:
                # Without this key the groups and the state dict are those of torch.
                group.pop("use_muon", None)
                _check_options(group)
                for p in group["params"]:
                    _check_parameter(p)
            else:
                _check_adamw_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a `tigon.Muon` with the same groups, or of a `torch.optim.Muon`."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=False):
            expected, value = (x.get("use_muon", True) for x in (group, loaded))
            if value != expected:
                raise ValueError(f"Muon: a group with use_muon={expected} cannot load one with use_muon={value}")
        super().load_state_dict(state_dict)

    # torch.compile does not trace the step.
    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A graph would store the addresses of the tables of this step.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Muon: a CUDA graph cannot capture a step")
        for position, group in enumerate(self.param_groups):
            if group.get("use_muon", True):
                self._step_matrices(group, position)
            else:
                self._step_adamw(group, position)
        return loss

    def _step_adamw(self, group: dict[str, Any], position: int) -> None:
        """Take the step of a group of AdamW. Its states are those of this optimizer."""
        adamw = self.__dict__.get("_adamw")
        if adamw is None:
            adamw = self._adamw = AdamW([torch.zeros(1, requires_grad=True)])
        adamw.state = self.state
        adamw.step_group(group, position)

    def _step_matrices(self, group: dict[str, Any], position: int) -> None:
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = float(lr) if lr.is_cpu else lr.reshape(())
        options = _StepOptions(
            lr, float(group["weight_decay"]), float(group["momentum"]), group["nesterov"],
            _coefficients(group), float(group["eps"]), group["adjust_lr_fn"],
        )  # fmt: skip
        params = [p for p in group["params"] if p.grad is not None]
        buckets: dict[tuple, list[_LocalMatrix]] = {}
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
            for part in _parts(p, state["momentum_buffer"]):
                buckets.setdefault(_bucket(part), []).append(part)
        # The tables are neither pickled nor copied, because torch's optimizers ignore other attributes there.
        tables = self.__dict__.setdefault("_tables", {}).setdefault(position, {})
        batches = [batch for bucket in buckets.values() for batch in _batches(bucket)]
        # The ranks that compute one matrix more differ from batch to batch.
        first_owner = 0
        for i, parts in enumerate(batches):
            tables[i] = _step_batch(parts[0].matrix.param, parts, options, first_owner, tables.get(i))
            # The numbers of whole matrices may differ between the ranks, and no rank computes those of another one.
            if parts[0].shard is not None:
                first_owner += len(parts)
        torch.autograd.graph.increment_version([*params, *(self.state[p]["momentum_buffer"] for p in params)])


class _StepOptions(NamedTuple):
    # On the device, a tensor without dimensions.
    lr: Tensor | float
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: Coefficients
    eps: float
    adjust_lr_fn: str | None


def _parts(p: Any, momentum: Any) -> list[_LocalMatrix]:
    """Return this rank's matrices of a parameter, or its rows of one."""
    grad = p.grad
    if torch.is_complex(p):
        raise RuntimeError("Muon: complex parameters are not supported")
    if grad.is_sparse:
        raise RuntimeError("Muon: sparse gradients are not supported")
    if is_dtensor(p) and not all(
        is_dtensor(x) and x.placements == p.placements and x.device_mesh == p.device_mesh for x in (grad, momentum)
    ):
        raise ValueError(
            f"Muon: a gradient and its momentum must be sharded like the parameter, by {tuple(p.placements)}"
        )
    shard, shape = shard_of(p), (p.shape[-2], p.shape[-1])
    if not p.numel():
        return []
    tensors = [local_part(x).detach() for x in (p, grad, momentum)]
    if p.ndim == 2:
        return [_LocalMatrix(Matrix(*tensors), shard, shape)]
    return [
        _LocalMatrix(Matrix(*matrices), None, shape) for matrices in zip(*(x.unbind() for x in tensors), strict=True)
    ]


def _is_in_kernel_memory(matrix: Matrix) -> bool:
    """Return whether the kernels can read and update a matrix."""
    param, grad, momentum = matrix
    return param.numel() > 0 and param.shape == momentum.shape and are_addressable(param, grad, momentum)


def _bucket(part: _LocalMatrix) -> tuple:
    """Return what the matrices of one batch have in common. For shards, it must not depend on the rank."""
    (param, grad, momentum), shard, shape = part
    common = shape, param.dtype, grad.dtype, momentum.dtype
    return (*common, param.device, _is_in_kernel_memory(part.matrix)) if shard is None else (*common, shard)


def _batches(parts: list[_LocalMatrix]) -> list[list[_LocalMatrix]]:
    """Divide matrices of one shape into batches of nearly equal sizes, of which a rank computes BATCH_BYTES at most."""
    (m, n), shard = parts[0].shape, parts[0].shard
    ranks = 1 if shard is None else dist.get_world_size(shard.process_group)
    limit = max(1, BATCH_BYTES // (2 * m * n)) * ranks
    size = cdiv(len(parts), cdiv(len(parts), limit))
    return [parts[i : i + size] for i in range(0, len(parts), size)]


@on_device
def _step_batch(
    first: Tensor, parts: list[_LocalMatrix], options: _StepOptions, first_owner: int, table: TensorTable | None
) -> TensorTable | None:
    """Take the step of matrices of one shape, of which `first` is one, and return the table of the kernels."""
    matrices, shard = [x.matrix for x in parts], parts[0].shard
    uses_kernels = all(map(_is_in_kernel_memory, matrices))
    squares = None
    if uses_kernels:
        table = table_of(matrices, table)
        u, squares = compute_momentum(matrices, options.momentum, options.nesterov, table)
    else:
        table = None
        u = torch.stack([momentum_reference(x, options.momentum, options.nesterov).bfloat16() for x in matrices])
    scales = None
    if shard is None:
        o, scales = orthogonalise(u, squares, options.coefficients, options.eps)
    else:
        o = orthogonalise_shards(u, shard, first_owner, options.coefficients, options.eps)
    (m, n), matches_adamw = parts[0].shape, options.adjust_lr_fn == "match_rms_adamw"
    ratio = 0.2 * math.sqrt(max(m, n)) if matches_adamw else math.sqrt(max(1, m / n))
    lr = options.lr.to(u.device, non_blocking=True) if isinstance(options.lr, Tensor) else options.lr
    if table is not None:
        apply_update(matrices, o, scales, lr, ratio, options.weight_decay, table)
        return table
    if scales is not None:
        o = o * scales[:, None, None]
    for matrix, update in zip(matrices, o, strict=True):
        update_reference(matrix.param, update, lr, ratio, options.weight_decay)
    return None


@functools.cache
def _adamw_defaults() -> dict[str, Any]:
    return AdamW([torch.zeros(1, requires_grad=True)]).defaults


def _check_parameter(p: Any) -> None:
    """Check that a parameter is a matrix or a stack of matrices, and how it is sharded."""
    if p.ndim not in (2, 3):
        raise ValueError(
            "Muon: a parameter must have 2 dimensions, or 3 if it stacks matrices, got shape "
            f"{tuple(p.shape)}; a group with use_muon=False takes it (tigon.muon_groups makes the groups of a model)"
        )
    checks.floating("Muon", params=p)
    shard_of(p)


def _check_adamw_group(group: dict[str, Any]) -> None:
    """Remove the options of Muon from a group of AdamW, and check the other ones."""
    for name in _MUON_OPTIONS:
        group.pop(name, None)
    for name in compact_states.OPTIONS:
        if name in group:
            raise ValueError(f"Muon: a group with use_muon=False cannot have {name}, got {group[name]!r}")
    try:
        AdamW([{**group, "params": [torch.zeros(1, requires_grad=True)]}])
    except (TypeError, ValueError) as error:
        raise type(error)(f"Muon: {str(error).removeprefix('AdamW: ')} in a group with use_muon=False") from error


def _check_options(options: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum", "eps"):
        value = options[name]
        if isinstance(value, Tensor) and name != "lr":
            raise TypeError(f"Muon: {name} must be a number, got {checks.format_value(value)}")
        check_number("Muon", name, value)
        # The value of a tensor would need a synchronisation with the device.
        if not isinstance(value, Tensor) and value < 0:
            raise ValueError(f"Muon: {name} must not be negative, got {checks.format_value(value)}")
    if options["momentum"] > 1:
        raise ValueError(f"Muon: momentum must be in [0, 1], got {checks.format_value(options['momentum'])}")
    checks.flag("Muon", nesterov=options["nesterov"])
    steps = options["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"Muon: ns_steps must be an int, got {checks.format_value(steps)}")
    if not 0 <= steps < 100:
        raise ValueError(f"Muon: ns_steps must be in [0, 99], got {checks.format_value(steps)}")
    if options["adjust_lr_fn"] is not None:
        checks.choice("Muon", "adjust_lr_fn", options["adjust_lr_fn"], ("original", "match_rms_adamw"))
    _coefficients(options)


def _coefficients(options: dict[str, Any]) -> Coefficients:
    value, steps = options["ns_coefficients"], options["ns_steps"]
    rows = value if isinstance(value, (tuple, list)) else ()
    if len(rows) == 3 and not any(isinstance(x, (tuple, list)) for x in rows):
        rows = (rows,) * max(steps, 1)
    is_valid = len(rows) == max(steps, 1) and all(isinstance(row, (tuple, list)) and len(row) == 3 for row in rows)
    if not is_valid:
        raise TypeError(
            "Muon: ns_coefficients must be three numbers, or three numbers for each step, got "
            f"{checks.format_value(value)}"
        )
    return [tuple(checks.number("Muon", "ns_coefficients", x) for x in row) for row in rows[:steps]]  # type: ignore[misc]
