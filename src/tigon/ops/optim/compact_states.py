"""The compact states of an optimizer: which tensors a parameter has, and their conversion from and to those of torch.

| tensor | dtype, shape | option |
|---|---|---|
| exp_avg, exp_avg_sq | fp32 or bf16, as the parameter | `state="fp32"`, `"bf16"`; small parameters with `"8bit"` |
| exp_avg_code, exp_avg_sq_code | int8 and uint8, as the parameter | `state="8bit"` |
| exp_avg_scale, exp_avg_sq_scale | fp32, one for each 128 values | `state="8bit"` |
| master | fp32, as the parameter | `master="fp32"` |
| correction | int8, as the parameter | `master="bf16+8"` |

Codes have other names than moments, so that torch's optimizer does not load codes as moments without a message.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.ops.optim import formats
from tigon.ops.optim.adamw_reference import AdamWTensors, start_of_step
from tigon.ops.optim.dtensors import is_dtensor, local_part
from tigon.ops.optim.formats import QUANT_BLOCK
from tigon.runtime import checks
from tigon.runtime.device import KERNEL_DTYPES, cdiv

STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The options of a group, with the values that change nothing.
OPTIONS: dict[str, Any] = {"state": None, "master": None, "stochastic_rounding": False}
# Smaller parameters, such as norms and biases, have fp32 moments: they matter more than the bytes that they take.
MIN_QUANTISED = 4096
# The name of each moment, the dtype of its codes, and the functions of its format.
_MOMENTS = (
    ("exp_avg", torch.int8, formats.encode_signed, formats.decode_signed),
    ("exp_avg_sq", torch.uint8, formats.encode_squares, formats.decode_squares),
)


def has_options(group: dict[str, Any]) -> bool:
    """Return whether a group has an option of compact states."""
    return any(group.get(name, default) != default for name, default in OPTIONS.items())


def check_group(group: dict[str, Any], max_grad_norm: float | None) -> None:
    """Check the options of a group of parameters: their values, and that no two of them exclude each other."""
    state, master, is_stochastic = (group.get(name, default) for name, default in OPTIONS.items())
    checks.choice("AdamW", "state", state, (None, *STATES, "8bit"))
    checks.choice("AdamW", "master", master, (None, "fp32", "bf16+8"))
    checks.flag("AdamW", stochastic_rounding=is_stochastic)
    options = {"state": state, "master": master, "max_grad_norm": max_grad_norm}
    requested = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    requested += ["stochastic_rounding=True"] * is_stochastic
    if not requested:
        return
    if master is not None and is_stochastic:
        raise ValueError(f"AdamW: master={master!r} and stochastic_rounding=True exclude each other")
    for name in ("amsgrad", "differentiable", "foreach"):
        if group.get(name):
            raise ValueError(f"AdamW: {requested[0]} and {name}=True exclude each other")
    for name in ("foreach", "fused"):
        if group.get(name) is False:
            raise ValueError(f"AdamW: {requested[0]} and {name}=False exclude each other")
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        raise ValueError(f"AdamW: {requested[0]} and betas as tensors exclude each other")
    for p in group["params"]:
        if p.dtype not in KERNEL_DTYPES:
            raise TypeError(
                f"AdamW: {requested[0]} needs parameters in float32, bfloat16 or float16, got {p.dtype} of shape "
                f"{tuple(p.shape)}"
            )
        if p.dtype == torch.float16 and (master == "bf16+8" or is_stochastic):
            name = f"master={master!r}" if master is not None else "stochastic_rounding=True"
            raise TypeError(f"AdamW: {name} needs parameters in bfloat16 or float32, got {p.dtype}")


def _is_quantised(p: Any, group: dict[str, Any]) -> bool:
    """Return whether the moments of a parameter are codes. The scales of a sharded parameter are sharded as the
    parameter is, so blocks must not cross its rows."""
    if group.get("state") != "8bit" or p.numel() < MIN_QUANTISED:
        return False
    if not is_dtensor(p):
        return True
    are_rows = all(x.is_replicate() or x.is_shard(0) for x in p.placements)
    return are_rows and p.dim() > 1 and (p.numel() // p.shape[0]) % QUANT_BLOCK == 0


def _shard_like(p: Any, local: Tensor, shape: Sequence[int], stride: tuple[int, ...]) -> Tensor:
    """Return a local tensor as a tensor of this shape that is sharded as `p` is."""
    if not is_dtensor(p):
        return local
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def _scale_like(p: Any) -> Tensor:
    """Return the scales of a quantised parameter, which are zero."""
    if not is_dtensor(p):
        return torch.zeros(cdiv(p.numel(), QUANT_BLOCK), dtype=torch.float32, device=p.device)
    local, columns = local_part(p), p.numel() // p.shape[0] // QUANT_BLOCK
    scale = torch.zeros(local.shape[0], columns, dtype=torch.float32, device=local.device)
    return _shard_like(p, scale, (p.shape[0], columns), (columns, 1))


def _zeros_like(p: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def create(p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    on_device = group.get("capturable") or group.get("fused")
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")}
    is_quantised = _is_quantised(p, group)
    moment_dtype = p.dtype if group.get("state") is None else STATES.get(group["state"], torch.float32)
    for name, code_dtype, *_ in _MOMENTS:
        if is_quantised:
            state[f"{name}_code"], state[f"{name}_scale"] = _zeros_like(p, code_dtype), _scale_like(p)
        else:
            state[name] = _zeros_like(p, moment_dtype)
    if p.dtype != torch.float32 and group.get("master") == "fp32":
        state["master"] = p.detach().to(torch.float32, copy=True)
    elif p.dtype != torch.float32 and group.get("master") == "bf16+8":
        state["correction"] = _zeros_like(p, torch.int8)
    return state


def local_tensors(p: Any, state: dict[str, Any], key: int) -> AdamWTensors:
    """Return this rank's part of the tensors of a parameter that has a gradient."""
    # Small models wait for the host, so plain tensors take few calls.
    param, grad = p, p.grad
    if "exp_avg" in state:
        m, v, m_scale, v_scale = state["exp_avg"], state["exp_avg_sq"], None, None
    else:
        m, v = state["exp_avg_code"], state["exp_avg_sq_code"]
        m_scale, v_scale = state["exp_avg_scale"], state["exp_avg_sq_scale"]
    master = state.get("master")
    if master is None:
        master = state.get("correction")
    if is_dtensor(p):
        if is_dtensor(grad) and grad.placements != p.placements:
            grad = grad.redistribute(p.device_mesh, p.placements)
        param, grad, m, v = local_part(p.detach()), local_part(grad), local_part(m), local_part(v)
        m_scale, v_scale, master = (None if x is None else local_part(x) for x in (m_scale, v_scale, master))
    shape = param.shape
    if not (m.shape == shape and v.shape == shape and (master is None or master.shape == shape)):
        raise RuntimeError(
            f"AdamW: a state of a parameter of size {tuple(shape)} has another size: {tuple(m.shape)}, {tuple(v.shape)}"
        )
    return AdamWTensors(param, grad, m, v, m_scale, v_scale, master, key, local_part(state["step"]))


def _decoded(p: Tensor, state: dict[str, Any], name: str, decode: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return this rank's part of a moment in fp32, from a state of any format."""
    if name in state:
        return local_part(state[name]).to(p.device, torch.float32)
    codes, scales = (local_part(state[f"{name}_{part}"]).to(p.device) for part in ("code", "scale"))
    return decode(codes.reshape(-1), scales.reshape(-1)).view(codes.shape)


def load(p: Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return the state that the options of a group require, from a state of torch's AdamW or of any of our formats."""
    state = create(p, group)
    for name in set(saved) - {"step", "exp_avg", "exp_avg_sq"}:
        if name not in state and not name.startswith(("exp_avg_", "master", "correction")):
            state[name] = saved[name]
    state["step"].copy_(torch.as_tensor(saved["step"]))

    def fill(name: str, values: Tensor) -> None:
        local = local_part(state[name])
        local.copy_(values.view(local.shape))

    for name, _, encode, decode in _MOMENTS:
        code, scale = f"{name}_code", f"{name}_scale"
        if code in saved and code in state:
            fill(code, local_part(saved[code]))
            fill(scale, local_part(saved[scale]))
        elif code in saved or name in saved:
            moment = _decoded(p, saved, name, decode)
            if code in state:
                codes, scales = encode(moment.reshape(-1))
                fill(code, codes)
                fill(scale, scales)
            else:
                fill(name, moment)
    # A master of the same format is copied, because the parameter may be loaded later. A master of another format is
    # used where it belongs to the parameter.
    for name in state.keys() & saved.keys() & {"master", "correction"}:
        fill(name, local_part(saved[name]))
    if "master" in state and "correction" in saved:
        # A tie was rounded away from zero. The fp32 master must be nearer to the parameter, or a step would ignore it.
        is_tie = local_part(saved["correction"]).to(p.device) == -128
        fill("master", (master_weight(p, saved).view(torch.int32) + is_tie).view(torch.float32))
    elif "correction" in state and "master" in saved:
        parameter, master = local_part(p.detach()).contiguous(), local_part(saved["master"]).to(p.device, torch.float32)
        fill("correction", formats.correction_of(parameter, master))
    return state


def master_weight(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Return this rank's part of a parameter in fp32, with the digits that its state adds."""
    master = state.get("master", state.get("correction"))
    return start_of_step(local_part(p.detach()), None if master is None else local_part(master).to(p.device))


def in_torch_form(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the keys of torch's AdamW. Moments that were codes are in fp32."""
    result = {"step": state["step"]}
    for name, _, _, decode in _MOMENTS:
        is_moment = name in state
        result[name] = (
            state[name] if is_moment else _shard_like(p, _decoded(p, state, name, decode), p.shape, p.stride())
        )
    return result
