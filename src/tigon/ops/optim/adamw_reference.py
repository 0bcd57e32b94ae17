"""The tensors and the options of a step of AdamW, and the step by operations of torch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.optim import formats


class AdamWTensors(NamedTuple):
    """The tensors of one parameter, all of N elements except the scales and the number of the step."""

    param: Tensor
    grad: Tensor
    # fp32 | bf16 | fp16, or codes in int8 and uint8 with their scales.
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    master: Tensor | None  # An fp32 master weight, the int8 correction of a bf16 parameter, or None
    # The key of the random numbers of this parameter.
    key: int
    step: Tensor | float


class AdamWOptions(NamedTuple):
    """The options of a step. `lr` is a number, or a tensor of one element in any dtype."""

    lr: Tensor | float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool = False
    factor: Tensor | None = None  # [] fp32, a factor of all gradients
    is_stochastic: bool = False  # True if bf16 parameters without a master weight are rounded stochastically.


def adamw_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float, *, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float, maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return p, m and v after step number `step`, in fp32, or in fp64 if p is in fp64. Tests compare with it."""
    wide_dtype = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(wide_dtype) for x in (param, grad, exp_avg, exp_avg_sq))
    g = -g if maximize else g
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = v.sqrt() / math.sqrt(1 - betas[1] ** step) + eps
    return p - lr * weight_decay * p - lr / (1 - betas[0] ** step) * m / denominator, m, v


def start_of_step(param: Tensor, master: Tensor | None) -> Tensor:
    """Return the fp32 value that a step starts from, a new tensor."""
    if master is None:
        return param.to(torch.float32, copy=True)
    if master.dtype == torch.int8:
        return formats.join_master(param, master)
    # The parameter was changed by something else if it is not the rounded master. The master then starts again from it.
    return torch.where(master.to(param.dtype) == param, master, param.float())


def step_reference(x: AdamWTensors, options: AdamWOptions) -> None:
    """Update the tensors of one parameter in place, of any shape and strides, by operations of torch in fp32."""
    step = float(x.step)
    param, grad = x.param.reshape(-1), x.grad.reshape(-1).float()
    if options.factor is not None:
        grad = grad * options.factor
    exp_avg, exp_avg_sq = x.exp_avg.reshape(-1), x.exp_avg_sq.reshape(-1)
    if x.exp_avg_scale is not None and x.exp_avg_sq_scale is not None:
        exp_avg = formats.decode_signed(exp_avg, x.exp_avg_scale.reshape(-1))
        exp_avg_sq = formats.decode_squares(exp_avg_sq, x.exp_avg_sq_scale.reshape(-1))
    master = None if x.master is None else x.master.reshape(-1)
    p, m, v = adamw_reference(
        start_of_step(param, master), grad, exp_avg, exp_avg_sq, step,
        lr=float(options.lr), betas=options.betas, eps=options.eps, weight_decay=options.weight_decay,
        maximize=options.maximize,
    )  # fmt: skip
    pairs = [(x.exp_avg, m), (x.exp_avg_sq, v)]
    if x.exp_avg_scale is not None and x.exp_avg_sq_scale is not None:
        dithers = formats.dither(v.numel(), int(step), v.device)
        (m_codes, m_scale), (v_codes, v_scale) = formats.encode_signed(m), formats.encode_squares(v, dithers)
        pairs = [(x.exp_avg, m_codes), (x.exp_avg_sq, v_codes)]
        pairs += [(x.exp_avg_scale, m_scale), (x.exp_avg_sq_scale, v_scale)]
    if x.master is not None and x.master.dtype == torch.int8:
        p, correction = formats.split_master(p)
        pairs.append((x.master, correction))
    elif x.master is not None:
        pairs.append((x.master, p))
    elif options.is_stochastic and param.dtype == torch.bfloat16:
        p = formats.round_stochastically(p, x.key, int(step))
    for destination, values in (*pairs, (x.param, p)):
        destination.copy_(values.view(destination.shape))
