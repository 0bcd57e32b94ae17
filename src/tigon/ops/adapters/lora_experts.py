r"""The MLPs of a mixture of experts with low-rank adapters on their weights.

    h[s] = x[s] U^T + s_u x[s] A_u^T B_u^T
    y[t] = sum_k w (a[s] D^T + s_d a[s] A_d^T B_d^T),  a[s] = act(h[s])

The row s belongs to the choice (t, k): x[s] = x[t], w = w[t, k], and U, D and the factors A and B are those of its
expert.

PEFT's code adds s B A to the weights of all experts in each forward, and backward computes the gradient of this sum,
which has the size of the weights. Here no tensor of that size exists. One autograd node computes frozen experts:
`lora_expert_nodes` has its formulas. The node needs bf16 or fp16, frozen weights without biases and an activation that
has a name. In any other case autograd differentiates the same grouped products.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate, r rank; S = T K rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tigon.memory.lean import recomputes_mlp, register_recomputation
from tigon.ops.adapters.lora_expert_nodes import AddGroupedAdapters, ExpertAdapter, ExpertsCall, LoRAExperts
from tigon.ops.experts.arguments import ACTIVATIONS, ExpertParameters, check_activated, check_experts
from tigon.ops.experts.choice_order import Routing, route
from tigon.ops.experts.differentiated import RoutingMatrices, differentiated_product, spread_rows
from tigon.ops.experts.grouped_linear import grouped_linear
from tigon.ops.experts.moe_mlp import moe_mlp_reference
from tigon.ops.experts.routing import combine
from tigon.runtime import checks
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import PLAIN, runs_kernels


def lora_moe_mlp_reference(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *,
    up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor, up_scaling: float = 1.0, down_scaling: float = 1.0,
    transposed: bool = False, activation: str | Callable[[Tensor], Tensor] = "silu",
) -> Tensor:  # fmt: skip
    """Compute `lora_moe_mlp` in eager torch as PEFT does, with the sums of weights and adapters as tensors."""
    up = _weight_with_adapter(up_proj, ExpertAdapter(up_a, up_b, up_scaling), transposed)
    down = _weight_with_adapter(down_proj, ExpertAdapter(down_a, down_b, down_scaling), transposed)
    return moe_mlp_reference(x, up, down, top_k_index, top_k_weights, transposed=transposed, activation=activation)


def _weight_with_adapter(weight: Tensor, adapter: ExpertAdapter, transposed: bool) -> Tensor:
    """Return W + s B A, computed in the dtype of W."""
    a, b = adapter.a.to(weight.dtype), adapter.b.to(weight.dtype)
    factors = (a.mT, b.mT) if transposed else (b, a)
    return torch.baddbmm(weight, *factors, alpha=adapter.scaling)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[ExpertAdapter], routing: Routing,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """Return the product of each row with the weight of its expert, plus bias and adapters, in the dtype of x."""
    y = differentiated_product(x, weight, bias, routing, transposed)
    if not adapters:
        return y
    factors = [tensor for adapter in adapters for tensor in (adapter.a, adapter.b)]
    if _takes_kernels(x, [x, *factors]):
        return AddGroupedAdapters.apply(x, y, routing, tuple(adapter.scaling for adapter in adapters), *factors)
    total = y
    for adapter in adapters:
        sum_dtype = torch.promote_types(x.dtype, adapter.a.dtype)
        # `grouped_mm` needs dense factors, and the experts of PEFT's B are adjacent in memory.
        a, b = adapter.a.to(sum_dtype).contiguous().mT, (adapter.b.to(sum_dtype) * adapter.scaling).mT.contiguous()
        total = total + grouped_linear(grouped_linear(x.to(sum_dtype), a, routing.ends), b, routing.ends)
    return total.to(y.dtype)


def _repeat_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, scalings: tuple[float, ...], *tensors: Tensor
) -> Tensor:
    """Return the result of `_product` once more. `tensors` are four matrices of the routing, and A and B in turn."""
    matrices, factors = tensors[:4], tensors[4:]
    adapters = [ExpertAdapter(*each) for each in zip(factors[::2], factors[1::2], scalings, strict=True)]
    return _product(x, weight, bias, adapters, RoutingMatrices(*matrices).routing(), transposed)


def _takes_kernels(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() or has_active_transform():
        return False
    if any(type(tensor) not in PLAIN or tensor.numel() == 0 for tensor in tensors):
        return False
    return x.dtype in (torch.bfloat16, torch.float16) and runs_kernels(x, *tensors)


def _takes_node(x: Tensor, tensors: Sequence[Tensor], parameters: ExpertParameters, activation: object) -> bool:
    """Return whether the node computes these experts: kernels run, and the weights are frozen and have no bias."""
    up, down, *biases = parameters
    is_frozen = not torch.is_grad_enabled() or not (up.requires_grad or down.requires_grad)
    has_bias = any(bias is not None for bias in biases)
    return (
        is_frozen
        and not has_bias
        and isinstance(activation, str)
        and x.dtype == up.dtype
        and _takes_kernels(x, tensors)
    )


def adapted_moe_mlp(
    x: Tensor, parameters: ExpertParameters, top_k_index: Tensor, top_k_weights: Tensor,
    up_adapters: Sequence[ExpertAdapter], down_adapters: Sequence[ExpertAdapter],
    activation: str | Callable[[Tensor], Tensor], transposed: bool, *, op: str = "moe_mlp",
) -> Tensor:  # fmt: skip
    """Return `moe_mlp` with any number of adapters on each product. The arguments are not checked, except for the
    result of an activation that is a function. The error names `op`."""
    routing = route(top_k_index, len(parameters.up))
    factors = [tensor for adapter in (*up_adapters, *down_adapters) for tensor in (adapter.a, adapter.b)]
    up, down, up_bias, down_bias = parameters
    if _takes_node(x, [x, up, down, top_k_weights, *factors], parameters, activation):
        scalings_of = lambda adapters: tuple(adapter.scaling for adapter in adapters)
        assert isinstance(activation, str)
        call = ExpertsCall(
            activation, transposed, (scalings_of(up_adapters), scalings_of(down_adapters)), not recomputes_mlp()
        )
        return LoRAExperts.apply(x, top_k_weights, up, down, routing, call, *factors)
    matrices = RoutingMatrices.of(routing)
    rows = spread_rows(x, up.dtype, *matrices)
    h = _product(rows, up, up_bias, up_adapters, routing, transposed)
    if recomputes_mlp():
        up_scalings = tuple(adapter.scaling for adapter in up_adapters)
        up_factors = factors[: 2 * len(up_adapters)]
        register_recomputation(h, _repeat_product, rows, up, up_bias, transposed, up_scalings, *matrices, *up_factors)
    if isinstance(activation, str):
        h = ACTIVATIONS[activation][0](h)
    else:
        h = check_activated(op, activation(h), (len(h), down.shape[1 if transposed else 2])).to(down.dtype)
    h = _product(h, down, down_bias, down_adapters, routing, transposed)
    return combine(h, top_k_weights, routing, x.dtype)


def lora_moe_mlp(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, up_a: Tensor,
    up_b: Tensor, down_a: Tensor, down_b: Tensor, up_scaling: float = 1.0, down_scaling: float = 1.0,
    transposed: bool = False, activation: str | Callable[[Tensor], Tensor] = "silu",
) -> Tensor:  # fmt: skip
    """Return `moe_mlp` with a low-rank adapter on each of the two products of every expert.

    All tensors but the indices get gradients. If the weights of the experts are frozen, backward computes no gradient
    of them, and no tensor of their size. The op then saves `x`, the result of the first product, [T K, 2 I], and the
    low-rank products, [T K, r]. In `tigon.lean(mlp=True)` it does not save the results of the first product, which
    backward repeats. PEFT's code rounds the factors to the dtype of the weights. Here each factor counts as
    the sum of two bf16 values, which keep 16 bits. The exception is an addition to a result in bf16, such as p B^T for
    p = x A^T: this product rounds p and B to bf16, as it rounds its result.

    Args:
        x: [T, H], fp32 | bf16 | fp16.
        up_proj, down_proj, top_k_index, top_k_weights, transposed, activation: As in `moe_mlp`.
        up_a: [E, r, H], fp32 | bf16 | fp16. Its dtype may differ from that of the weights, and its strides are any.
        up_b: [E, 2 I, r], or [E, I, r] for an activation without a gate, in the dtype of `up_a`.
        down_a: [E, r, I].
        down_b: [E, H, r], in the dtype of `down_a`.
        up_scaling: The factor of the first adapter: alpha / r, or alpha / sqrt(r) if it is rank-stabilised.
        down_scaling: The factor of the second adapter.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        TypeError: A tensor argument is not a floating-point tensor, a factor is not a number, or `activation` is
            neither a str nor a function.
        ValueError: Shapes do not fit, dtypes or devices differ, or `activation` is unknown.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Shazeer et al., arXiv:1701.06538.

    Example:
        >>> x, up, down = torch.randn(5, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
        >>> weights, index = torch.rand(5, 4).topk(2)
        >>> shapes = {"up_a": (2, 8), "up_b": (32, 2), "down_a": (2, 16), "down_b": (8, 2)}
        >>> factors = {name: torch.randn(4, *shape) for name, shape in shapes.items()}
        >>> tigon.lora_moe_mlp(x, up, down, index, weights, **factors, up_scaling=0.5, down_scaling=0.5).shape
        torch.Size([5, 8])
    """
    op = "lora_moe_mlp"
    factors = {"up_a": up_a, "up_b": up_b, "down_a": down_a, "down_b": down_b}
    checks.tensor(op, **factors)
    checks.floating(op, **factors)
    parameters = ExpertParameters(up_proj, down_proj, None, None)
    sizes = check_experts(op, x, parameters, top_k_index, top_k_weights, transposed, activation)
    for name, inputs, outputs in (("up", sizes.hidden, sizes.width), ("down", sizes.inner, sizes.hidden)):
        a, b = factors[f"{name}_a"], factors[f"{name}_b"]
        if a.dim() != 3:
            raise ValueError(f"{op}: {name}_a must have shape [E, r, {inputs}], got {tuple(a.shape)}")
        checks.shape(op, f"{name}_a", a, (sizes.experts, a.shape[1], inputs))
        checks.shape(op, f"{name}_b", b, (sizes.experts, outputs, a.shape[1]))
        checks.same(op, "dtype", **{f"{name}_a": a, f"{name}_b": b})
    checks.same(op, "device", x=x, **factors)
    up = ExpertAdapter(up_a, up_b, checks.number(op, "up_scaling", up_scaling))
    down = ExpertAdapter(down_a, down_b, checks.number(op, "down_scaling", down_scaling))
    return adapted_moe_mlp(x, parameters, top_k_index, top_k_weights, (up,), (down,), activation, transposed, op=op)
