r"""The auxiliary loss that balances the experts of a mixture (Fedus et al., arXiv:2101.03961), over all layers at once.

    p[l, t] = softmax(z[l, t]),  c[l, t, e] = 1 if e is one of the K largest z[l, t], else 0
    N = sum_l sum_t m[t],  f[e] = sum_l sum_t m[t] c[l, t, e] / N,  P[e] = sum_l sum_t m[t] p[l, t, e] / N
    loss = E sum_e f[e] P[e]
    dz[l, t] = dloss m[t] p[l, t] (g - <p[l, t], g>),  g[e] = E f[e] / N

One kernel reads the logits of a layer once. It computes the softmax, adds the probabilities and counts the chosen
experts. Each program writes its sums, and they are added in a fixed order, so the loss is the same from run to run. A
second kernel computes the softmax again and writes dz. So the op saves the logits and g, and the host never waits.

Experts are ranked by their logits: those with the K largest are the chosen ones. Of equal logits, that of the smaller
index counts as larger. The softmax keeps the order, but in bf16 its rounding makes some different logits equal.

Shapes: L layers, T tokens, E experts, K experts of a token; z is [T, E] for each layer, and the mask m is [T].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.runtime import checks
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, cdiv, device_of, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.op import Node
from tigon.runtime.rows import dense_rows
from tigon.runtime.tuning import LaunchConfig

# --- reference -----------------------------------------------------------------------------------


def load_balancing_loss_reference(
    router_logits: Tensor | Sequence[Tensor], num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Compute `load_balancing_loss` in eager torch, layer by layer, for tests and for devices without Triton."""
    layers, attention_mask = _as_layers(router_logits, attention_mask)
    wide = torch.promote_types(layers[0].dtype, torch.float32)
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(wide)
    counts, sums, total = (layers[0].new_zeros(n, dtype=wide) for n in (num_experts, num_experts, 1))
    for layer in layers:
        m = layer.new_ones(layer.shape[0], dtype=wide) if mask is None else mask
        logits = layer.to(wide).masked_fill((m == 0)[:, None], 0.0)
        # A stable sort keeps the order of equal logits. `topk` has no such order.
        chosen = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        counts = counts.index_add(0, chosen.flatten(), m.repeat_interleave(top_k))
        sums = sums + (logits.softmax(-1) * m[:, None]).sum(0)
        total = total + m.sum()
    scale = torch.where(total > 0, num_experts / total.square(), 0.0)
    return (counts * sums * scale).sum()


def _as_layers(
    router_logits: Tensor | Sequence[Tensor], attention_mask: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the logits of each layer, and the mask. One tensor is one layer with the tokens of all layers."""
    if not isinstance(router_logits, Tensor):
        return tuple(router_logits), attention_mask
    if attention_mask is not None and router_logits.dim() == 3:
        attention_mask = attention_mask.reshape(-1).repeat(len(router_logits))
    return (router_logits.flatten(0, -2),), attention_mask


# --- configuration -------------------------------------------------------------------------------

# The kernels hold whole rows. Rows of more experts take the reference.
LARGEST_ROW = 8192


class LoadBalancingProblem(NamedTuple):
    """The size that the launch parameters depend on."""

    # The number of experts, E.
    experts: int


@dataclass(frozen=True)
class LoadBalancingConfig(LaunchConfig):
    """Launch parameters. A program computes `block_t` tokens at a time, with all their logits in registers."""

    block_t: int
    num_warps: int
    # The largest number of programs of the kernel that computes sums.
    programs: int

    @staticmethod
    def heuristic(problem: LoadBalancingProblem, device: Device) -> "LoadBalancingConfig":
        """Return tiles of at most 16 elements for each thread, and two programs for each multiprocessor."""
        width = triton.next_power_of_2(problem.experts)
        warps = min(device.max_warps, 4 if width <= 2048 else 4 * (width // 2048))
        block_t = max(1, 16 * warps * device.warp_size // width)
        return LoadBalancingConfig(block_t, warps, 2 * device.multiprocessors)


# --- kernels -------------------------------------------------------------------------------------

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _load_rows(logits_ptr, mask_ptr, stride, rows, experts, block, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Load the logits of a block of tokens, and the mask. Return also the softmax, and which elements are logits."""
    row = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    is_row = row < rows
    weight = tl.where(is_row, 1.0, 0.0)
    if mask_ptr is not None:
        weight = tl.load(mask_ptr + row, mask=is_row, other=0.0)
    # The logits of masked tokens are not read.
    is_logit = (weight != 0.0)[:, None] & (expert < experts)[None, :]
    z = tl.load(logits_ptr + row[:, None] * stride + expert[None, :], mask=is_logit, other=-float("inf")).to(tl.float32)
    largest = tl.where(weight != 0.0, tl.max(z, 1), 0.0)
    e = tl.exp(z - largest[:, None])
    total = tl.where(weight != 0.0, tl.sum(e, 1), 1.0)
    return z, e / total[:, None], weight, is_logit


@triton.jit(do_not_specialize=["rows", "experts", "top_k", "blocks", "programs", "first"])
def _sums_kernel(
    logits_ptr, mask_ptr, sums_ptr,  # [T, E], [T] fp32 or None, [programs, 2, E] fp32
    stride, rows, experts, top_k, blocks, programs, first,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Count the chosen experts, and add the probabilities, of every block of tokens of this program.

    Program 0 writes to the row `first` of the sums.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    sums = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for block in range(program, blocks, programs):
        z, p, weight, is_logit = _load_rows(logits_ptr, mask_ptr, stride, rows, experts, block, BLOCK_T, BLOCK_E)
        sums += p * weight[:, None]
        # The bits of a float, without its sign, are in the order of the floats. The key of a logit is larger than the
        # keys of all smaller logits, and of equal logits with a larger index. Negative zero equals zero.
        bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        keys = tl.where(is_logit, (ordered << 32) | (BLOCK_E - 1 - expert)[None, :].to(tl.int64), LOWEST)
        for _ in range(top_k):
            keys = tl.where(keys == tl.max(keys, 1)[:, None], LOWEST, keys)
        counts += tl.where((keys == LOWEST) & is_logit, weight[:, None], 0.0)
    sums_ptr += (first + program).to(tl.int64) * 2 * experts
    tl.store(sums_ptr + expert, tl.sum(counts, 0), mask=expert < experts)
    tl.store(sums_ptr + experts + expert, tl.sum(sums, 0), mask=expert < experts)


@triton.jit(do_not_specialize=["rows", "experts"])
def _gradient_kernel(
    logits_ptr, mask_ptr, factors_ptr, dloss_ptr, out_ptr,  # [T, E], [T] fp32 or None, [E] fp32, [], [T, E]
    stride, rows, experts,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute dz of a block of tokens."""
    block = tl.program_id(0)
    row = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    _, p, weight, _ = _load_rows(logits_ptr, mask_ptr, stride, rows, experts, block, BLOCK_T, BLOCK_E)
    g = tl.load(factors_ptr + expert, mask=expert < experts, other=0.0)[None, :]
    scale = weight * tl.load(dloss_ptr).to(tl.float32)
    dz = p * (g - tl.sum(p * g, 1)[:, None]) * scale[:, None]
    is_stored = (row < rows)[:, None] & (expert < experts)[None, :]
    tl.store(out_ptr + row[:, None] * experts + expert[None, :], dz, mask=is_stored)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def _choose(logits: Tensor) -> tuple[LoadBalancingConfig, int]:
    """Return the launch parameters, and the width of a block of experts."""
    config = LoadBalancingConfig.choose(LoadBalancingProblem(logits.shape[1]), device_of(logits))
    return config, triton.next_power_of_2(logits.shape[1])


def _empty_forward(first: Tensor) -> tuple[Tensor, Tensor]:
    return first.new_empty((), dtype=torch.float32), first.new_empty(first.shape[1], dtype=torch.float32)


@launcher(fake=_empty_forward)
def load_balancing_forward(
    first: Tensor, layers: Sequence[Tensor], mask: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return the loss, an fp32 scalar, and g [E]. `first` is the first of the layers."""
    (config, width), experts = _choose(first), first.shape[1]
    blocks = [cdiv(layer.shape[0], config.block_t) for layer in layers]
    programs = [min(config.programs, n) for n in blocks]
    parts = first.new_empty((sum(programs), 2, experts), dtype=torch.float32)
    start = 0
    for layer, n, count in zip(layers, blocks, programs, strict=True):
        rows, stride = dense_rows(layer)
        launch(
            _sums_kernel, count, rows, mask, parts,
            stride, layer.shape[0], experts, top_k, n, count, start,
            BLOCK_T=config.block_t, BLOCK_E=width, num_warps=config.num_warps,
        )  # fmt: skip
        start += count
    # The counts of long sequences are larger than the integers of fp32.
    counts, sums = parts.sum(0, dtype=torch.float64).unbind()
    if mask is None:
        factors = counts * (experts / sum(layer.shape[0] for layer in layers) ** 2)
    else:
        total = mask.sum(dtype=torch.float64) * len(layers)
        factors = counts * torch.where(total > 0, experts / total.square(), 0.0)
    return (factors * sums).sum().float(), factors.float()


@launcher(fake=lambda logits: logits.new_empty(logits.shape))
def load_balancing_backward(logits: Tensor, mask: Tensor | None, factors: Tensor, dloss: Tensor) -> Tensor:
    """Return dz [T, E] of one layer."""
    config, width = _choose(logits)
    (rows, stride), dz = dense_rows(logits), logits.new_empty(logits.shape)
    launch(
        _gradient_kernel, cdiv(logits.shape[0], config.block_t), rows, mask, factors, dloss, dz,
        stride, *logits.shape,
        BLOCK_T=config.block_t, BLOCK_E=width, num_warps=config.num_warps,
    )  # fmt: skip
    return dz


# --- autograd ------------------------------------------------------------------------------------


class _LoadBalancing(Node):
    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, top_k: int, *layers: Tensor) -> Tensor:
        loss, factors = load_balancing_forward(layers[0], layers, mask, top_k)
        ctx.save_for_backward(mask, factors, *layers)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        mask, factors, *layers = ctx.saved_tensors
        gradients = [
            load_balancing_backward(layer, mask, factors, dloss) if needed else None
            for layer, needed in zip(layers, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *gradients


# --- public --------------------------------------------------------------------------------------


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor], num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Return the loss that balances the experts of a mixture, over all of its layers. The logits get gradients.

    The loss is E sum_e f[e] P[e], where f[e] is the share of tokens that choose expert e, and P[e] is the mean of its
    probability. It is K if all experts are chosen equally often. A token chooses the experts with the K largest logits.
    Of equal logits, the one with the smaller index comes first. The arguments are those of
    `load_balancing_loss_func` of transformers. The op saves the logits. The host does not wait for the device.

    Args:
        router_logits: The logits of each layer, [T, E], fp32 | bf16 | fp16, in a tuple or a list. One tensor [T, E] is
            one layer, and one tensor [L, T, E] is L layers.
        num_experts: E.
        top_k: K, the number of experts that each token chooses.
        attention_mask: T numbers of any shape, such as [B, S], or None. Each token counts as often as its number says.
            Tokens with 0 are not read, and their gradients are 0.

    Returns:
        An fp32 scalar. It is 0 if there are no tokens, or all are masked.

    Raises:
        TypeError: An argument has another type.
        ValueError: Shapes or devices do not fit, or `top_k` is not in [1, E].

    Source: Fedus et al., "Switch Transformers", arXiv:2101.03961.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.5, 1.0]])
        >>> tigon.load_balancing_loss((logits, logits), num_experts=3, top_k=1)
        tensor(1.0861)
    """
    _check(router_logits, num_experts, top_k, attention_mask)
    layers, attention_mask = _as_layers(router_logits, attention_mask)
    mask = None if attention_mask is None else attention_mask.detach().reshape(-1).float()
    fits = num_experts <= LARGEST_ROW and any(layer.shape[0] for layer in layers)
    if not (fits and all(map(runs_kernels, layers))):
        return load_balancing_loss_reference(layers, num_experts, top_k, attention_mask)
    return _LoadBalancing.apply(mask, top_k, *layers)


def _check(router_logits: Any, num_experts: Any, top_k: Any, attention_mask: Any) -> None:
    """Refuse bad arguments."""
    op = "load_balancing_loss"
    checks.size(op, "num_experts", num_experts)
    checks.size(op, "top_k", top_k)
    if not isinstance(router_logits, (Tensor, tuple, list)):
        raise TypeError(f"{op}: router_logits must be a Tensor or a tuple of them, got {type(router_logits).__name__}")
    if isinstance(router_logits, Tensor) and router_logits.dim() not in (2, 3):
        raise ValueError(f"{op}: router_logits must be [T, E] or [L, T, E], got shape {tuple(router_logits.shape)}")
    layers = router_logits
    if isinstance(router_logits, Tensor):
        layers = (router_logits,) if router_logits.dim() == 2 else router_logits.detach().unbind()
    if not layers:
        raise ValueError(f"{op}: router_logits must have at least one layer, got none")
    if top_k > num_experts:
        raise ValueError(f"{op}: top_k must be at most num_experts, which is {num_experts}, got {top_k}")
    if attention_mask is not None:
        checks.tensor(op, attention_mask=attention_mask)
        if attention_mask.is_complex():
            raise TypeError(f"{op}: attention_mask must hold real numbers, got {attention_mask.dtype}")
    for i, layer in enumerate(layers):
        name = f"router_logits[{i}]"
        checks.floating(op, **{name: layer})
        rows = layer.shape[0] if attention_mask is None and layer.dim() else None
        rows = attention_mask.numel() if attention_mask is not None else rows
        if layer.dim() != 2 or tuple(layer.shape) != (rows, num_experts):
            expected = "T" if rows is None else rows
            raise ValueError(f"{op}: {name} must have shape ({expected}, {num_experts}), got {tuple(layer.shape)}")
    names = {f"router_logits[{i}]": layer for i, layer in enumerate(layers)}
    checks.same(op, "device", **names, attention_mask=attention_mask)
