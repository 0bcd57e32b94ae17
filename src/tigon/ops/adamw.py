r"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): one step of one tensor, in place, in one pass over memory.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    p <- (1 - lr weight_decay) p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

t counts steps from 1. Everything in fp32, each of p, m and v rounded once: p moves by m and v as they are before they
are rounded. 1 - beta^t is -expm1(t log beta), because in fp32 the difference from one would lose its digits in the
first steps; for the same reason the host gives 1 - beta and log beta, which it has in fp64.

Shapes: all tensors have N elements, without gaps. A step reads p, g, m, v and writes p, m, v: in bf16 14 bytes a
parameter.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.ops.dispatch import cdiv, launch, on_device

__all__ = ["Config", "adamw_reference", "adamw_step"]


# --- reference -----------------------------------------------------------------------------------


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """p, g, m, v [...] -> p, m, v after step number `step`, in fp32, or fp64 where p is: the tests' ground truth."""
    wide = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(wide) for x in (param, grad, exp_avg, exp_avg_sq))
    g = -g if maximize else g
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = v.sqrt() / math.sqrt(1 - betas[1] ** step) + eps
    return p - lr * weight_decay * p - lr / (1 - betas[0] ** step) * m / denominator, m, v


# --- configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Launch parameters: a program takes `block` elements; `eviction` is the L2 policy of loads and stores."""

    block: int
    num_warps: int = 4
    eviction: str = ""  # "" | "evict_first" | "evict_last", as Triton names them

    @staticmethod
    @functools.cache  # one lookup for each of hundreds of launches
    def heuristic(itemsize: int) -> "Config":
        """For parameters of so many bytes an element: one access of 16 bytes a thread for each of the seven."""
        return Config(block=4 * 32 * 16 // itemsize)


# --- kernel --------------------------------------------------------------------------------------


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, to fp32's last digits: by its series where the difference would lose them."""
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series))
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * series))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _update(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, step_ptr, lr_ptr, step, lr, mask,
    beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """One block: pointers to its elements, and which of them are inside (None: all)."""
    g = tl.load(grad_ptr, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    m = tl.load(exp_avg_ptr, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    p = tl.load(param_ptr, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    if step_ptr is not None:
        step = tl.load(step_ptr).to(tl.float32)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    step_size = lr / _one_minus_exp(step * log_beta1)
    scale = 1.0 / tl.sqrt(_one_minus_exp(step * log_beta2))
    decay = lr * weight_decay
    if MAXIMIZE:
        g = -g
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    # Not p * (1 - decay), which rounds twice: a decay is often of the size of fp32's last digit.
    p = p - decay * p
    p = p - step_size * (m / (tl.sqrt(v) * scale + eps))
    tl.store(param_ptr, p, mask=mask, eviction_policy=EVICTION)
    tl.store(exp_avg_ptr, m, mask=mask, eviction_policy=EVICTION)
    tl.store(exp_avg_sq_ptr, v, mask=mask, eviction_policy=EVICTION)


@triton.jit(do_not_specialize=["N"])
def _step_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr,  # [N]
    step_ptr, lr_ptr,  # [], or None: the numbers `step` and `lr`
    N, step, lr, beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps,
    MAXIMIZE: tl.constexpr, EVICTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    param_ptr += start + offsets
    grad_ptr += start + offsets
    exp_avg_ptr += start + offsets
    exp_avg_sq_ptr += start + offsets
    # A block that is full needs no mask, and so has accesses of 16 bytes whatever N is.
    if start + BLOCK <= N:
        _update(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, step_ptr, lr_ptr, step, lr, None,
            beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE, EVICTION,
        )  # fmt: skip
    else:
        _update(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, step_ptr, lr_ptr, step, lr, start + offsets < N,
            beta1, beta2, rest1, rest2, log_beta1, log_beta2, weight_decay, eps, MAXIMIZE, EVICTION,
        )  # fmt: skip


# --- launcher ------------------------------------------------------------------------------------


@on_device
def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor | float,
    lr: Tensor | float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    *,
    config: Config | None = None,
) -> None:
    """p, g, m, v [...], contiguous on one device, fp32 | bf16 | fp16: p, m and v become those after step number `step`.

    `step` and `lr` are numbers, or tensors of one element on that device, which only the device reads.
    """
    config = config or Config.heuristic(param.element_size())
    beta1, beta2 = betas
    n = param.numel()
    step_ptr, step = (step, 0.0) if isinstance(step, Tensor) else (None, float(step))
    lr_ptr, lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, float(lr))
    launch(
        _step_kernel, cdiv(n, config.block), param, grad, exp_avg, exp_avg_sq, step_ptr, lr_ptr,
        n, step, lr, float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2),
        float(weight_decay), float(eps),
        MAXIMIZE=maximize, EVICTION=config.eviction, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
