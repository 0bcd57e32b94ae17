"""AdamW whose step is one pass over memory: the optimizer of torch, with a kernel for the tensors that it supports."""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tigon.ops.optim import compact_states
from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors, step_reference
from tigon.ops.optim.grad_norm import clip_factor, total_norm
from tigon.ops.optim.tensor_table import are_addressable
from tigon.runtime import checks
from tigon.runtime.compat.graphs import disable_dynamo
from tigon.runtime.compat.operators import increment

# The first instance of torch's class wraps `step`. With the wrapper, every step hook would run twice.
_torch_step = inspect.unwrap(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
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
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *, state: str | None = None,
        master: str | None = None, stochastic_rounding: bool = False, max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
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
        with prefixed_errors("AdamW"):
            super().__init__(params, **options)
        self.defaults |= compact
        if max_grad_norm is not None:
            self.defaults["max_grad_norm"] = float(max_grad_norm)
        # Torch's constructor has added the groups without these options.
        for group in self.param_groups:
            for name, value in compact.items():
                group.setdefault(name, value)
            self._check_group(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the compact options of a group, and let a `GradScaler` unscale the gradients if its step does not."""
        compact_states.check_group(group, self.defaults.get("max_grad_norm"))
        if self._is_compact(group):
            self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options; see `torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            _check_options(param_group)
            if "max_grad_norm" in param_group:
                raise ValueError("AdamW: max_grad_norm must be an option of the optimizer, got a group with it")
        with prefixed_errors("AdamW"):
            super().add_param_group(param_group)
        # Torch has turned the parameters into a list, and added the defaults. All groups share the norm.
        self.param_groups[-1].pop("max_grad_norm", None)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # torch.compile does not trace the step.
    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._clip_factor: Tensor | None = None
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            for position, group in enumerate(self.param_groups):
                self.step_group(group, position)
        return loss

    def step_group(self, group: dict[str, Any], position: Any) -> None:
        """Take the step of a group, which need not be one of `param_groups`, without hooks. Its tables are stored at
        `position`."""
        is_compact = self._is_compact(group)
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if is_captured:
            if is_compact:
                raise RuntimeError(
                    "AdamW: a CUDA graph cannot capture a step with state, master, stochastic_rounding or max_grad_norm"
                )
            # Each replay would repeat the bias correction of the captured step.
            if not group["capturable"]:
                raise RuntimeError("AdamW: a CUDA graph can capture a step only with capturable=True, got False")
        # A CUDA graph would store the addresses of the tables of this step.
        if not is_compact and (is_captured or self._uses_torch(group)):
            self._step_by_torch(group)
            return
        is_stochastic = group.get("stochastic_rounding", False)
        keys = self._keys() if is_stochastic else {}
        supported: dict[Any, AdamWTensors] = {}
        others: dict[Any, AdamWTensors] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError("AdamW: sparse gradients are not supported; use torch.optim.SparseAdam")
            state = self.state[p]
            if not state:
                state.update(compact_states.create(p, group))
            x = compact_states.local_tensors(p, state, keys.get(id(p), 0))
            (supported if are_addressable(*x[:7]) and x.grad.shape == x.param.shape else others)[p] = x
        # Every rank takes part in the sum of the norm, even if it has no gradient.
        factor = self._factor()
        lr = group["lr"]
        lr = float(lr) if isinstance(lr, Tensor) and lr.is_cpu else lr
        numbers = group["betas"], group["eps"], group["weight_decay"], group["maximize"]
        options = AdamWOptions(lr, *numbers, factor, is_stochastic)
        if supported:
            _increment_steps(supported.values())
            # The tables are neither pickled nor copied, because torch's optimizers ignore other attributes there.
            tables = self.__dict__.setdefault("_tables", {}).setdefault(position, {})
            adamw_step(supported.values(), options, tables=tables)
            torch.autograd.graph.increment_version(supported)
        if others and not is_compact:
            self._step_by_torch({**group, "params": list(others)})
        elif others:
            _increment_steps(others.values())
            for x in others.values():
                step_reference(x, options)

    def _is_compact(self, group: dict[str, Any]) -> bool:
        return self.defaults.get("max_grad_norm") is not None or compact_states.has_options(group)

    def _uses_torch(self, group: dict[str, Any]) -> bool:
        """Return whether torch's own code takes the step of a group, because of the options of the group."""
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        return (
            group["foreach"] is not None
            or group["fused"] is False
            or group["amsgrad"]
            or group["differentiable"]
            or not all(isinstance(x, (int, float)) for x in numbers)
            or getattr(self, "grad_scale", None) is not None
            or getattr(self, "found_inf", None) is not None
        )

    def _step_by_torch(self, group: dict[str, Any]) -> None:
        """Let torch's own code take the step of a group."""
        groups, self.param_groups = self.param_groups, [group]
        try:
            _torch_step(self)
        finally:
            self.param_groups = groups

    def _keys(self) -> dict[int, int]:
        """Return the position of each parameter in the optimizer, by its id."""
        params = [p for group in self.param_groups for p in group["params"]]
        keys = self.__dict__.get("_param_keys")
        # An engine may exchange the objects, as FSDP2 does when it shards a model.
        if keys is None or len(keys) != len(params) or not all(id(p) in keys for p in params):
            keys = self._param_keys = {id(p): i for i, p in enumerate(params)}
        return keys

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step with `max_grad_norm`, fp32 on the device; None before."""
        return self.__dict__.get("_grad_norm")

    def _factor(self) -> Tensor | None:
        """Return the factor of all gradients of this step, which its first group computes; None without a limit."""
        max_norm = self.defaults.get("max_grad_norm")
        if max_norm is None:
            return None
        if self._clip_factor is None:
            params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            tables = self.__dict__.setdefault("_norm_tables", {})
            self._grad_norm = total_norm([p.grad for p in params if p.grad is not None], tables, params)
            self._clip_factor = clip_factor(self._grad_norm, max_norm)
        # The quotient of an infinite limit and an infinite norm would be NaN.
        return None if max_norm == math.inf else self._clip_factor

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any `tigon.AdamW` or `torch.optim.AdamW`, and convert it to the formats of this optimizer.
        Options of formats stay those of this optimizer; other options come from the state dict, as in torch."""
        states: dict[Any, dict[str, Any]] = {}
        ids: list[Any] = []

        def take_states(_: Any, incoming: dict[str, Any]) -> dict[str, Any] | None:
            """Keep the states from torch, which would cast them to the dtypes of parameters."""
            has_codes = any(isinstance(x, dict) and "exp_avg_code" in x for x in incoming["state"].values())
            groups, current = incoming["param_groups"], self.param_groups
            if not (has_codes or any(map(self._is_compact, current))) or len(groups) != len(current):
                return None
            groups = [self._loaded_group(x, group) for x, group in zip(groups, current, strict=True)]
            ids.extend(i for group in groups for i in group["params"])
            states.update({i: x for i, x in incoming["state"].items() if i in ids})
            others = {i: x for i, x in incoming["state"].items() if i not in ids}
            return {**incoming, "param_groups": groups, "state": others}

        def put_states(_: Any) -> None:
            pairs = [(p, group) for group in self.param_groups for p in group["params"]]
            for i, (p, group) in zip(ids, pairs, strict=False):
                if i in states:
                    self.state[p] = compact_states.load(p, states[i], group)

        handles = [
            self.register_load_state_dict_pre_hook(take_states),
            self.register_load_state_dict_post_hook(put_states, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        self.__dict__.pop("_tables", None)

    def _loaded_group(self, loaded: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
        """Return the group of a state dict with the formats of a group of this optimizer."""
        names = compact_states.OPTIONS
        group = {name: x for name, x in loaded.items() if name not in names}
        group |= {name: current[name] for name in names if name in current}
        if self._is_compact(current):
            # The step is neither of these implementations.
            group["foreach"], group["fused"] = None, group.get("fused") or None
            compact_states.check_group({**group, "params": current["params"]}, self.defaults.get("max_grad_norm"))
        return group

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state dict that `torch.optim.AdamW` loads. Moments of 8 bits become fp32. Master weights are not
        part of it: torch's optimizer has none. `master_weight` returns them."""
        state_dict = self.state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        state = {
            i: compact_states.in_torch_form(params[i], x) if isinstance(i, int) and "step" in x else x
            for i, x in state_dict["state"].items()
        }
        groups = [{k: x for k, x in g.items() if k not in compact_states.OPTIONS} for g in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    def master_weight(self, p: Tensor) -> Tensor:
        """Return a parameter in fp32 with the digits that its master weight adds; of a DTensor, this rank's part."""
        return compact_states.master_weight(p, self.state.get(p, {}))


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
    """Check the types of options. Torch checks the ranges, but accepts wrong types, and then fails in the first step. A
    learning rate may be a scalar of numpy, because some schedules return such scalars."""
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
def prefixed_errors(op: str) -> Iterator[None]:
    """Put the optimizer's name before the messages of errors that torch raises in the block."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError) or str(error).startswith(f"{op}: "):
            raise
        raise type(error)(f"{op}: {error}") from error


def _increment_steps(parameters: Iterable[AdamWTensors]) -> None:
    steps_by_device: dict[int, list[Any]] = {}
    for x in parameters:
        steps_by_device.setdefault(x.step.get_device(), []).append(x.step)  # type: ignore[union-attr]
    for steps in steps_by_device.values():
        increment(steps, 1)
