"""AdamW whose step is one pass over memory: torch's optimizer, with a kernel of Tigon's for what it can take."""

import contextlib
import inspect
import math
import sys
from collections.abc import Iterator
from numbers import Real

import torch
from torch import Tensor

from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.runtime import checks
from tigon.runtime.device import KERNEL_DTYPES, PLAIN, runs_kernels
from tigon.runtime.torch_private import disable_dynamo, has_init_group, increment

__all__ = ["AdamW"]

# Without the wrapper that an instance of torch's class puts around it, which would call every step hook twice.
_torch_step = inspect.unwrap(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, same arguments, states and state dict; its step reads and writes each tensor once.

    One launch of a Triton kernel takes the parameters of a group that are contiguous CUDA or ROCm tensors in fp32, bf16
    or fp16, or this rank's shards of such (DTensor, as FSDP2 makes them). The arithmetic is in fp32, and rounded once
    to the dtype of each tensor, as in torch with `fused=True`. Everything else takes torch's own path, by the options
    given: other tensors, `foreach=True` or `False`, `fused=False`, `amsgrad`, `differentiable`, betas as tensors, a
    `GradScaler` that leaves scaling to the optimizer (`fused=True`), a step that is captured in a CUDA graph
    (`capturable=True`).

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused:
            As torch has them. `fused=True` or `capturable=True` keeps the counts of steps on the device; nothing
            waits for it either way.

    Raises:
        ValueError, RuntimeError, TypeError: What torch's constructor raises, and options of another type.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = tigon.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options
    ) -> None:  # fmt: skip
        for name in options:
            checks.choice("AdamW", "an option", name, (*_FLAGS, *_CHOICES))
        options |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        _check_options(options)
        with _named_refusals():
            super().__init__(params, **options)

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with options of their own; see `torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            _check_options(param_group)
        with _named_refusals():
            super().add_param_group(param_group)

    # torch.compile runs it as it is: while tracing, torch calls `_init_group`, which here would take the step.
    @disable_dynamo
    def step(self, closure=None):
        """Take a step; see `torch.optim.Optimizer.step`."""
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return _torch_step(self, closure)

    def _init_group(self, group, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps):
        """Fill the lists as torch does, take the step of what the kernel can, and leave torch the rest."""
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)
        has_complex = super()._init_group(group, *lists)
        if self._leaves_to_torch(group):
            return has_complex
        found = [_local(*x) for x in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)]
        taken = [i for i, tensors in enumerate(found) if tensors is not None and _is_plain(steps[i])]
        if not taken:
            return has_complex
        counters = [steps[i] for i in taken]
        _count(counters)
        lr = group["lr"]
        lr = float(lr) if isinstance(lr, Tensor) and lr.is_cpu else lr
        options = group["betas"], group["eps"], group["weight_decay"], group["maximize"]
        # Of each group its own; not pickled and not copied, since torch's optimizers leave such attributes out.
        position = next(i for i, x in enumerate(self.param_groups) if x is group)
        tables = self.__dict__.setdefault("_tables", {}).setdefault(position, {})
        adamw_step(*zip(*(found[i] for i in taken), strict=True), counters, lr, *options, tables=tables)
        written = [x[i] for i in taken for x in (params, exp_avgs, exp_avg_sqs)]
        torch.autograd.graph.increment_version(written)
        left = sorted(set(range(len(params))) - set(taken))
        for x in lists:
            x[:] = [x[i] for i in left] if x else []
        return has_complex

    def _leaves_to_torch(self, group: dict) -> bool:
        """Whether the group's options ask for something that the kernel does not do, or for another way by name."""
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        return (
            group["foreach"] is not None
            or (group["capturable"] and torch.cuda.is_current_stream_capturing())  # a graph would keep old addresses
            or group["fused"] is False
            or group["amsgrad"]
            or group["differentiable"]
            or not all(isinstance(x, (int, float)) for x in numbers)
            or getattr(self, "grad_scale", None) is not None
            or getattr(self, "found_inf", None) is not None
        )


# A torch with another `_init_group` takes the whole step itself.
if not has_init_group():
    del AdamW._init_group


_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
_CHOICES = ("foreach", "fused")  # None leaves the choice to the optimizer


def _check_options(options: dict) -> None:
    """Refuse options of a wrong type, which torch takes and fails with in the first step. Ranges are torch's to check.

    A learning rate may be a scalar of numpy, as schedules make them.
    """
    numbers = {name: options[name] for name in ("lr", "eps", "weight_decay") if name in options}
    if "betas" in options:
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"AdamW: betas must be two numbers, got {checks.shown(betas)}")
        numbers |= {"betas[0]": betas[0], "betas[1]": betas[1]}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
            raise TypeError(f"AdamW: {name} must be a number, got {checks.shown(value)}")
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_meta or value.is_complex() or value.dtype == torch.bool:
                raise ValueError(f"AdamW: {name} must be a number or one element, got {checks.shown(value)}")
        elif not abs(value) < math.inf or abs(value) > sys.float_info.max:
            raise ValueError(f"AdamW: {name} must be finite, got {checks.shown(value)}")
    checks.flag("AdamW", **{name: options[name] for name in _FLAGS if name in options})
    checks.flag("AdamW", **{name: options[name] for name in _CHOICES if options.get(name) is not None})


@contextlib.contextmanager
def _named_refusals() -> Iterator[None]:
    """Begin the message of what torch refuses in the block with the optimizer's name."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError) or str(error).startswith("AdamW: "):
            raise
        raise type(error)(f"AdamW: {error}") from error


def _is_plain(x: Tensor) -> bool:
    return type(x) in PLAIN or not hasattr(x, "__tensor_flatten__")


def _local(param: Tensor, *others: Tensor) -> tuple[Tensor, ...] | None:
    """Parameter, gradient and moments as memory on this rank, or None if the kernel cannot take them."""
    tensors = (param, *others)
    if type(param) not in PLAIN and hasattr(param, "to_local"):
        if not all(hasattr(x, "to_local") for x in others):
            return None
        if not all(x.placements == param.placements and x.device_mesh == param.device_mesh for x in others):
            return None
        tensors = tuple(x.to_local() for x in tensors)
    first = tensors[0]
    if not (first.is_cuda or runs_kernels(first)):
        return None
    device, shape = first.get_device(), first.shape
    for x in tensors:  # no generators: small models wait for the host
        if not (x.dtype in KERNEL_DTYPES and x.is_contiguous() and x.get_device() == device and x.shape == shape):
            return None
        if type(x) not in PLAIN and not _is_plain(x):
            return None
    return tensors


def _count(steps: list[Tensor]) -> None:
    """One more step, in place, in few launches."""
    by_device: dict[int, list[Tensor]] = {}
    for x in steps:
        by_device.setdefault(x.get_device(), []).append(x)
    for group in by_device.values():
        increment(group, 1)
