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

from typing import Any

import torch
from torch import Tensor

from tigon.ops.optim import formats
from tigon.ops.optim.adamw_reference import AdamWTensors
from tigon.ops.optim.dtensors import is_dtensor, local_part
from tigon.ops.optim.formats import QUANT_BLOCK
from tigon.runtime import checks
from tigon.runtime.device import KERNEL_DTYPES, cdiv

STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The options of a group, with the values that change nothing.
OPTIONS: dict[str, Any] = {"state": None, "master": None, "stochastic_rounding": False}
# Smaller parameters, such as norms and biases, have fp32 moments: they matter more than the bytes that they take.
MIN_QUANTISED = 4096


# --- options ---------------------------------------------------------------------------------------


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


# --- tensors of a parameter ------------------------------------------------------------------------


def _is_quantised(p: Any, group: dict[str, Any]) -> bool:
    """Return whether the moments of a parameter are codes.

    The scales of a sharded parameter are sharded as the parameter is, so blocks must not cross its rows.
    """
    if group.get("state") != "8bit" or p.numel() < MIN_QUANTISED:
        return False
    if not is_dtensor(p):
        return True
    are_rows = all(x.is_replicate() or x.is_shard(0) for x in p.placements)
    return are_rows and p.dim() > 1 and (p.numel() // p.shape[0]) % QUANT_BLOCK == 0


def _scale_like(p: Any) -> Tensor:
    """Return the scales of a quantised parameter, which are zero."""
    local = local_part(p)
    if not is_dtensor(p):
        return torch.zeros(cdiv(p.numel(), QUANT_BLOCK), dtype=torch.float32, device=p.device)
    from torch.distributed.tensor import DTensor

    columns = p.numel() // p.shape[0] // QUANT_BLOCK
    scale = torch.zeros(local.shape[0], columns, dtype=torch.float32, device=local.device)
    shape, stride = torch.Size((p.shape[0], columns)), (columns, 1)
    return DTensor.from_local(scale, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def _zeros_like(p: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def _moment_dtype(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Return the dtype of moments that are no codes."""
    state = group.get("state")
    return p.dtype if state is None else STATES.get(state, torch.float32)


def create(p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter before its first step."""
    on_device = group.get("capturable") or group.get("fused")
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")}
    if _is_quantised(p, group):
        state["exp_avg_code"], state["exp_avg_scale"] = _zeros_like(p, torch.int8), _scale_like(p)
        state["exp_avg_sq_code"], state["exp_avg_sq_scale"] = _zeros_like(p, torch.uint8), _scale_like(p)
    else:
        dtype = _moment_dtype(p, group)
        state["exp_avg"], state["exp_avg_sq"] = _zeros_like(p, dtype), _zeros_like(p, dtype)
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


# --- conversion ------------------------------------------------------------------------------------


def _wrap(local: Tensor, like: Any) -> Tensor:
    """Return a local tensor as a tensor that is sharded as `like` is."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _moments(p: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return this rank's part of both moments in fp32, from a state of any format."""
    if "exp_avg_code" not in state:
        m, v = (local_part(state[name]).to(p.device, torch.float32) for name in ("exp_avg", "exp_avg_sq"))
        return m, v
    codes = [local_part(state[f"{name}_code"]).to(p.device) for name in ("exp_avg", "exp_avg_sq")]
    scales = [local_part(state[f"{name}_scale"]).to(p.device).reshape(-1) for name in ("exp_avg", "exp_avg_sq")]
    m = formats.decode_signed(codes[0].reshape(-1), scales[0]).view(codes[0].shape)
    v = formats.decode_squares(codes[1].reshape(-1), scales[1]).view(codes[1].shape)
    return m, v


def load(p: Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return the state that the options of a group require, from a state of torch's AdamW or of any of our formats."""
    state = create(p, group)
    for name in set(saved) - {"step", "exp_avg", "exp_avg_sq"}:
        if name not in state and not name.startswith(("exp_avg_", "master", "correction")):
            state[name] = saved[name]
    state["step"].copy_(torch.as_tensor(saved["step"]))
    has_same_codes = "exp_avg_code" in saved and "exp_avg_code" in state
    if has_same_codes:
        for name in ("exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale"):
            local_part(state[name]).copy_(local_part(saved[name]))
    elif "exp_avg" in saved or "exp_avg_code" in saved:
        m, v = _moments(p, saved)
        if "exp_avg_code" in state:
            for name, (codes, scale) in {
                "exp_avg": formats.encode_signed(m.reshape(-1)),
                "exp_avg_sq": formats.encode_squares(v.reshape(-1)),
            }.items():
                local_codes, local_scale = local_part(state[f"{name}_code"]), local_part(state[f"{name}_scale"])
                local_codes.copy_(codes.view(local_codes.shape))
                local_scale.copy_(scale.view(local_scale.shape))
        else:
            local_part(state["exp_avg"]).copy_(m)
            local_part(state["exp_avg_sq"]).copy_(v)
    if "master" in state or "correction" in state:
        _load_master(p, saved, state)
    return state


def _load_master(p: Tensor, saved: dict[str, Any], state: dict[str, Any]) -> None:
    """Fill the master weight of a state from a saved one of either format, if there is one.

    A master of the same format is copied, because the parameter may be loaded later. A master of another format is used
    where it belongs to the parameter.
    """
    for name in ("master", "correction"):
        if name in state and name in saved:
            local_part(state[name]).copy_(local_part(saved[name]))
            return
    if "master" in state and "correction" in saved:
        weight = master_weight(p, saved)
        # A tie was rounded away from zero. The fp32 master must be nearer to the parameter, or a step would ignore it.
        is_tie = local_part(saved["correction"]).to(p.device) == -128
        local_part(state["master"]).copy_((weight.view(torch.int32) + is_tie).view(torch.float32))
    elif "correction" in state and "master" in saved:
        parameter, master = local_part(p.detach()).contiguous(), local_part(saved["master"]).to(p.device, torch.float32)
        local_part(state["correction"]).copy_(formats.correction_of(parameter, master))


def master_weight(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Return this rank's part of a parameter in fp32, with the digits that its state adds."""
    local = local_part(p.detach())
    if "master" in state:
        master = local_part(state["master"]).to(p.device, torch.float32)
        return torch.where(master.to(p.dtype) == local, master, local.float())
    if "correction" in state:
        correction = local_part(state["correction"]).to(p.device)
        return formats.join_master(local.reshape(-1), correction.reshape(-1)).view(local.shape)
    return local.to(torch.float32, copy=True)


def in_torch_form(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the keys of torch's AdamW. Moments that were codes are in fp32."""
    m, v = _moments(p, state) if "exp_avg_code" in state else (state["exp_avg"], state["exp_avg_sq"])
    if "exp_avg_code" in state:
        m, v = _wrap(m, p), _wrap(v, p)
    return {"step": state["step"], "exp_avg": m, "exp_avg_sq": v}
