"""The part of `tigon.AdamW` that stores compact states and clips gradients: its step, and its state dicts."""

import math
from typing import Any

import torch
from torch import Tensor

from tigon.ops.optim import compact_states
from tigon.ops.optim.adamw_kernels import adamw_step
from tigon.ops.optim.adamw_reference import AdamWOptions, AdamWTensors, step_reference
from tigon.ops.optim.grad_norm import clip_factor, total_norm
from tigon.runtime.compat.operators import increment
from tigon.runtime.device import runs_kernels


def increment_steps(steps: list[Tensor]) -> None:
    """Add 1 to the numbers of steps in place, with one launch for each device."""
    steps_by_device: dict[int, list[Tensor]] = {}
    for x in steps:
        steps_by_device.setdefault(x.get_device(), []).append(x)
    for group in steps_by_device.values():
        increment(group, 1)


def _are_in_kernel_memory(x: AdamWTensors) -> bool:
    """Return whether the kernel can update the local tensors of a parameter."""
    param, grad = x.param, x.grad
    if not runs_kernels(param, grad) or grad.shape != param.shape:
        return False
    device = param.get_device()
    return all(y is None or (y.is_contiguous() and y.get_device() == device) for y in x[:7])


class CompactAdamW(torch.optim.AdamW):
    """AdamW with the options `state`, `master`, `stochastic_rounding` of groups, and `max_grad_norm`."""

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step with `max_grad_norm`, fp32 on the device; None before."""
        return self.__dict__.get("_grad_norm")

    def _is_compact(self, group: dict[str, Any]) -> bool:
        """Return whether the step of a group is that of this class."""
        return self.defaults.get("max_grad_norm") is not None or compact_states.has_options(group)

    def _tables_of(self, group: dict[str, Any]) -> dict:
        """Return the tables of a group's launches.

        They are neither pickled nor copied, because torch's optimizers ignore other attributes there.
        """
        position = self.__dict__.get("_position")
        if position is None:
            position = next(i for i, x in enumerate(self.param_groups) if x is group)
        return self.__dict__.setdefault("_tables", {}).setdefault(position, {})

    def _keys(self) -> dict[int, int]:
        """Return the position of each parameter in the optimizer, by its id."""
        params = [p for group in self.param_groups for p in group["params"]]
        keys = self.__dict__.get("_param_keys")
        # An engine may exchange the objects, as FSDP2 does when it shards a model.
        if keys is None or len(keys) != len(params) or not all(id(p) in keys for p in params):
            keys = self._param_keys = {id(p): i for i, p in enumerate(params)}
        return keys

    def _factor(self) -> Tensor | None:
        """Return the factor of all gradients of this step, or None without `max_grad_norm`.

        The first group of a step computes it, because a closure may compute the gradients after the step begins.
        """
        max_norm = self.defaults.get("max_grad_norm")
        if max_norm is None:
            return None
        factor = self.__dict__.get("_clip_factor")
        if factor is None:
            params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            tables = self.__dict__.setdefault("_norm_tables", {})
            self._grad_norm = total_norm([p.grad for p in params if p.grad is not None], tables, params)
            factor = self._clip_factor = clip_factor(self._grad_norm, max_norm)
        # The quotient of an infinite limit and an infinite norm would be NaN.
        return None if max_norm == math.inf else factor

    def _step_compactly(self, group: dict[str, Any]) -> None:
        """Take the step of a group."""
        # A graph would store the addresses of the tables of this step.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AdamW: a CUDA graph cannot capture a step with state, master, stochastic_rounding or max_grad_norm"
            )
        keys = self._keys()
        params = [p for p in group["params"] if p.grad is not None]
        supported: list[AdamWTensors] = []
        others: list[AdamWTensors] = []
        steps: list[Tensor] = []
        for p in params:
            if p.grad.is_sparse:
                raise RuntimeError("AdamW: sparse gradients are not supported")
            state = self.state[p]
            if not state:
                state.update(compact_states.create(p, group))
            steps.append(state["step"])
            x = compact_states.local_tensors(p, state, keys[id(p)])
            (supported if _are_in_kernel_memory(x) else others).append(x)
        # Every rank takes part in the sum of the norm, even if it has no gradient.
        factor = self._factor()
        if not params:
            return
        increment_steps(steps)
        lr = group["lr"]
        lr = float(lr) if isinstance(lr, Tensor) and lr.is_cpu else lr
        numbers = group["betas"], group["eps"], group["weight_decay"], group["maximize"]
        options = AdamWOptions(lr, *numbers, factor, group.get("stochastic_rounding", False))
        if supported:
            adamw_step(supported, options, tables=self._tables_of(group))
            torch.autograd.graph.increment_version(params)
        for x in others:
            step_reference(x, options)

    # --- state dicts ---------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any `tigon.AdamW` or `torch.optim.AdamW`, and convert it to the formats of this optimizer.

        Options of formats stay those of this optimizer; other options come from the state dict, as in torch.
        """
        options = [{name: x[name] for name in compact_states.OPTIONS if name in x} for x in self.param_groups]
        are_compact = [self._is_compact(group) for group in self.param_groups]
        states: dict[Any, dict[str, Any]] = {}
        ids: list[Any] = []

        def take_states(_: Any, incoming: dict[str, Any]) -> dict[str, Any] | None:
            """Keep the states from torch, which would cast them to the dtypes of parameters."""
            has_codes = any(isinstance(x, dict) and "exp_avg_code" in x for x in incoming["state"].values())
            groups = incoming["param_groups"]
            if not (any(are_compact) or has_codes) or len(groups) != len(self.param_groups):
                return None
            groups = [dict(group) for group in groups]
            for group, current, formats, is_compact in zip(
                groups, self.param_groups, options, are_compact, strict=True
            ):
                for name in compact_states.OPTIONS:
                    group.pop(name, None)
                group.update(formats)
                if is_compact:
                    # The step of this class is neither of these implementations.
                    group["foreach"], group["fused"] = None, group.get("fused") or None
                    compact_states.check_group(
                        {**group, "params": current["params"]}, self.defaults.get("max_grad_norm")
                    )
            ids[:] = [i for group in groups for i in group["params"]]
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

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state dict that `torch.optim.AdamW` loads. Moments of 8 bits become fp32.

        Master weights are not part of it: torch's optimizer has none. `master_weight` returns them.
        """
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
