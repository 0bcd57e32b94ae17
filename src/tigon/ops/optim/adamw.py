"""AdamW whose step is one pass over memory: the optimizer of torch, with a kernel for the tensors that it supports."""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tigon.ops.optim import compact_states
from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors
from tigon.ops.optim.compact_optimizer import CompactAdamW, increment_steps
from tigon.runtime import checks
from tigon.runtime.compat.graphs import disable_dynamo
from tigon.runtime.compat.operators import has_init_group
from tigon.runtime.device import KERNEL_DTYPES, PLAIN, runs_kernels

# The first instance of torch's class wraps `step`. With the wrapper, every step hook would run twice.
_torch_step = inspect.unwrap(torch.optim.AdamW.step)


class AdamW(CompactAdamW):
    """`torch.optim.AdamW` with the same arguments, states and state dict. Its step reads and writes each tensor once.

    One launch of a Triton kernel updates all parameters of a group that are contiguous CUDA or ROCm tensors in fp32,
    bf16 or fp16, or shards of such tensors on this rank (DTensor, as in FSDP2). The kernel computes in fp32 and rounds
    once to the dtype of each tensor, as torch does with `fused=True`.

    Torch's own code updates all other tensors. It also takes the whole step with `foreach=True` or `False`,
    `fused=False`, `amsgrad`, `differentiable`, betas as tensors, a `GradScaler` that leaves scaling to the optimizer
    (`fused=True`), and when a CUDA graph captures the step (`capturable=True`).

    The options `state`, `master`, `stochastic_rounding` and `max_grad_norm` choose what is stored between steps, and
    clip gradients. Then one kernel takes the whole step for any of these combinations, and on the CPU its reference in
    torch does. A parameter group may have its own `state`, `master` and `stochastic_rounding`.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused:
            The arguments of `torch.optim.AdamW`. With `fused=True` or `capturable=True` the numbers of steps are on the
            device. The host never waits for the device.
        state: The format of both moments: "fp32", "bf16", "8bit" (codes of 8 bits with an fp32 scale for each 128
            values; parameters of fewer than 4096 elements have fp32 moments), or None for the dtype of the parameter.
        master: The additional precision of bf16 parameters: "fp32" (master weights, also for fp16 parameters), "bf16+8"
            (8 more bits, so that parameter and state are a number of 24 bits), or None.
        stochastic_rounding: bf16 parameters are rounded up or down at random, such that no small update is lost on
            average. The random numbers depend only on the number of the step and the positions of the parameter and of
            the element.
        max_grad_norm: Scale the gradients of all groups in the step such that their common norm is at most this number,
            as `torch.nn.utils.clip_grad_norm_` does, or None. `grad_norm` is then the norm. The gradients in memory are
            not changed.

    Raises:
        ValueError, RuntimeError, TypeError: The constructor of torch raises it, an option has a wrong type or value, or
            two options exclude each other.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101. Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", arXiv:2110.02861. Gonzalez Ortiz et al., "FlashOptim", arXiv:2602.23349.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = tigon.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        state: str | None = None,
        master: str | None = None,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            checks.choice("AdamW", "an option", name, (*_FLAGS, *_CHOICES))
        options |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        _check_options(options)
        # An infinite limit only computes the norm.
        if max_grad_norm is not None and not (isinstance(max_grad_norm, float) and max_grad_norm == math.inf):
            checks.number("AdamW", "max_grad_norm", max_grad_norm, 0, excludes_low=True)
        # Options that change nothing are not stored, so that the groups and the state dict are those of torch.
        compact: dict[str, Any] = {"state": state, "master": master, "stochastic_rounding": stochastic_rounding}
        compact = {name: x for name, x in compact.items() if x is not compact_states.OPTIONS[name]}
        if max_grad_norm is not None:
            compact["max_grad_norm"] = float(max_grad_norm)
        if compact and not has_init_group():
            raise RuntimeError(f"AdamW: {next(iter(compact))} needs torch 2.8 to 2.13, got {torch.__version__}")
        # Torch's constructor adds the groups, before `defaults` can have these options.
        self._new_defaults = compact
        with _prefixed_errors():
            super().__init__(params, **options)
        del self._new_defaults
        self.defaults |= compact
        self._leave_scaling_to_scaler()

    def _leave_scaling_to_scaler(self) -> None:
        """Let a `GradScaler` unscale the gradients itself if the step of a group does not."""
        if any(map(self._is_compact, self.param_groups)):
            self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options; see `torch.optim.Optimizer.add_param_group`."""
        options = self.__dict__.get("_new_defaults", self.defaults)
        if isinstance(param_group, dict):
            _check_options(param_group)
            if "max_grad_norm" in param_group:
                raise ValueError("AdamW: max_grad_norm must be an option of the optimizer, got a group with it")
            for name in compact_states.OPTIONS:
                if name in options:
                    param_group.setdefault(name, options[name])
        with _prefixed_errors():
            super().add_param_group(param_group)
        # Torch has turned the parameters into a list. All groups share the norm.
        self.param_groups[-1].pop("max_grad_norm", None)
        try:
            compact_states.check_group(self.param_groups[-1], options.get("max_grad_norm"))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._leave_scaling_to_scaler()

    # torch.compile does not trace the step. During tracing torch calls `_init_group`, which takes a step here.
    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see `torch.optim.Optimizer.step`."""
        self.__dict__.pop("_clip_factor", None)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return _torch_step(self, closure)

    def step_group(self, group: dict[str, Any], position: Any) -> None:
        """Take the step of a group that is not one of `param_groups`, without hooks. Its tables are at `position`."""
        groups, self._position = self.param_groups, position
        try:
            with torch.no_grad():
                if self._is_compact(group):
                    self._step_compactly(group)
                else:
                    self.param_groups = [group]
                    _torch_step(self)
        finally:
            self.param_groups = groups
            del self._position

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> bool:
        """Fill the lists as torch does, update the tensors that the kernel supports, and remove them from the lists."""
        if self._is_compact(group):
            self._step_compactly(group)
            return False
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)
        has_complex = super()._init_group(group, *lists)
        if self._uses_torch(group):
            return has_complex
        supported: dict[int, tuple[Tensor, ...]] = {}
        for i, tensors in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
            local_tensors = _local_tensors(*tensors)
            if local_tensors is not None and _is_plain(steps[i]):
                supported[i] = local_tensors
        if not supported:
            return has_complex
        increment_steps([steps[i] for i in supported])
        lr = group["lr"]
        lr = float(lr) if isinstance(lr, Tensor) and lr.is_cpu else lr
        options = AdamWOptions(lr, group["betas"], group["eps"], group["weight_decay"], group["maximize"])
        plain = (None, None, None, 0)
        parameters = [AdamWTensors._make((*x, *plain, steps[i])) for i, x in supported.items()]
        adamw_step(parameters, options, tables=self._tables_of(group))
        torch.autograd.graph.increment_version([x[i] for i in supported for x in (params, exp_avgs, exp_avg_sqs)])
        others = [i for i in range(len(params)) if i not in supported]
        for x in lists:
            x[:] = [x[i] for i in others] if x else []
        return has_complex

    def _uses_torch(self, group: dict[str, Any]) -> bool:
        """Return whether torch's own code takes the step of a group, because of the options of the group."""
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        # A CUDA graph would store the addresses of the table of this step.
        is_captured = group["capturable"] and torch.cuda.is_current_stream_capturing()
        return (
            group["foreach"] is not None
            or is_captured
            or group["fused"] is False
            or group["amsgrad"]
            or group["differentiable"]
            or not all(isinstance(x, (int, float)) for x in numbers)
            or getattr(self, "grad_scale", None) is not None
            or getattr(self, "found_inf", None) is not None
        )


# If `_init_group` of this torch has another signature, torch's own code takes all steps.
if not has_init_group():
    del AdamW._init_group


_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
# None leaves the choice to the optimizer.
_CHOICES = ("foreach", "fused")


def check_number(op: str, name: str, value: Any) -> None:
    """Check that an option of an optimizer is a finite number, or a tensor of one element."""
    if not isinstance(value, (Real, Tensor)) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number, got {checks.format_value(value)}")
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{op}: {name} must be a number or one element, got {checks.format_value(value)}")
        return
    number: Any = value
    if not abs(number) < math.inf or abs(number) > sys.float_info.max:
        raise ValueError(f"{op}: {name} must be finite, got {checks.format_value(value)}")


def _check_options(options: dict[str, Any]) -> None:
    """Check the types of options. Torch checks the ranges, but accepts wrong types, and then fails in the first step.

    A learning rate may be a scalar of numpy, because some schedules return such scalars.
    """
    numbers: dict[str, Any] = {name: options[name] for name in ("lr", "eps", "weight_decay") if name in options}
    if "betas" in options:
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"AdamW: betas must be two numbers, got {checks.format_value(betas)}")
        numbers |= {"betas[0]": betas[0], "betas[1]": betas[1]}
    for name, value in numbers.items():
        check_number("AdamW", name, value)
    checks.flag("AdamW", **{name: options[name] for name in _FLAGS if name in options})
    checks.flag("AdamW", **{name: options[name] for name in _CHOICES if options.get(name) is not None})


@contextlib.contextmanager
def _prefixed_errors() -> Iterator[None]:
    """Put the optimizer's name before the messages of errors that torch raises in the block."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError) or str(error).startswith("AdamW: "):
            raise
        raise type(error)(f"AdamW: {error}") from error


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor has memory, unlike a wrapper subclass."""
    return type(x) in PLAIN or not hasattr(x, "__tensor_flatten__")


def _local_tensors(param: Any, *others: Any) -> tuple[Tensor, ...] | None:
    """Return this rank's part of a parameter, its gradient and its moments; None if the kernel cannot update them."""
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
    # A loop is faster than generators, and small models wait for the host.
    for x in tensors:
        if not (x.dtype in KERNEL_DTYPES and x.is_contiguous() and x.get_device() == device and x.shape == shape):
            return None
        if type(x) not in PLAIN and not _is_plain(x):
            return None
    return tensors
