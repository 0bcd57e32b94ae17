"""Recognise mixtures of experts that run every expert on every token, as Llama 4 does in transformers.

Such a module has a router, which returns the scores of all experts [T, E] (zero for those that a token does not choose)
and its logits; experts with two weights, [E, H, 2 I] and [E, I, H]; and an MLP that all tokens share. It computes

    y = shared(x) + sum_e expert_e(score[:, e] * x)

An expert without bias computes zero from zeros, so `moe_mlp` computes only the experts with a score. The difference is
the order of sums, and that an infinite or NaN value of x does not reach the experts that its token does not choose.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.experts.arguments import ACTIVATIONS
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.recognition.parts.comparison import is_as_exact, run_probes
from tigon.recognition.probing.standin import (
    gradients,
    has_no_tensors,
    normal,
    own_tensors,
    random_linear,
    run_forward,
    same_gradients,
    stand_in,
)
from tigon.recognition.probing.trials import record
from tigon.recognition.replacement import is_changed
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.engines import full_shape
from tigon.runtime.reach.explore import explore

TOKENS, EXPERTS, HIDDEN, INNER = 17, 12, 24, 40
# The numbers of experts, of hidden features and of intermediate features.
Sizes = tuple[int, int, int]

DIFFERENT = "computes something else than moe_mlp with weighted inputs"


class Roles(NamedTuple):
    """The names of the children and parameters of a mixture."""

    router: str
    experts: str
    shared: str
    # The weights of the experts, [E, H, 2 I] and [E, I, H].
    up: str
    down: str


@dataclass(frozen=True)
class MixtureRecipe:
    """Recipe: `moe_mlp` on the experts that each token chooses, plus the child that all tokens share."""

    roles: Roles
    choices_per_token: int
    activation: str

    @property
    def searched(self) -> tuple[str, ...]:
        """Return the children whose settings the guard compares: the recipe depends on them."""
        return self.roles.router, self.roles.experts

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        roles = self.roles
        experts = getattr(module, roles.experts)
        up, down = getattr(experts, roles.up), getattr(experts, roles.down)
        # A global module hook would see a call of the experts, and the op makes no such call.
        if not self._fits(args, kwargs, up, down) or any_global_hook():
            return type(module).forward(module, *args, **kwargs)
        x = args[0].reshape(-1, args[0].shape[-1])
        scores, logits = getattr(module, roles.router)(x)
        weights, index = scores.topk(self.choices_per_token, dim=-1)
        y = moe_mlp(x, up, down, index, weights, activation=self.activation, transposed=True, weight_inputs=True)
        return getattr(module, roles.shared)(x) + y, logits

    def _fits(self, args: tuple, kwargs: dict[str, Any], up: Tensor, down: Tensor) -> bool:
        if len(args) != 1 or kwargs or torch.is_autocast_enabled(up.device.type):
            return False
        tensors = x, _, _ = args[0], up, down
        is_plain = all(type(t) in PLAIN and t.dtype == up.dtype in KERNEL_DTYPES for t in tensors)
        # The weights of other engines, such as ZeRO-3, are gathered only while the experts are called.
        return is_plain and x.dim() >= 2 and up.dim() == down.dim() == 3 and x.shape[-1] == up.shape[1]

    def __str__(self) -> str:
        return f"moe_mlp, {self.activation}, weights multiply the inputs"


def _find_roles(module: nn.Module) -> tuple[Roles, Sizes] | None:
    """Find the three children by the shapes of their tensors. Return None if the module has no such children."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    for name, child in children.items():
        shapes = [(key, full_shape(t)) for key, t in own_tensors(child).items() if t is not None]
        if [len(shape) for _, shape in shapes] != [3, 3]:
            continue
        others = {key: other for key, other in children.items() if key != name and not has_no_tensors(other)}
        if len(others) != 2:
            continue
        (up, (count, hidden, inner)), (down, down_shape) = shapes
        if inner % 2 or down_shape != (count, inner // 2, hidden) or not all(map(has_no_tensors, child.children())):
            continue
        for router, shared in (tuple(others), tuple(others)[::-1]):
            tensors = [t for t in own_tensors(others[router]).values() if t is not None]
            if not any(others[router].children()) and [full_shape(t) for t in tensors] == [(count, hidden)]:
                return Roles(router, name, shared, up, down), (count, hidden, inner // 2)
    return None


def _small_mixture(module: nn.Module, roles: Roles, sizes: Sizes, seed: int, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the module with small children. A linear layer stands for the child that all tokens share."""
    router, experts = (getattr(module, name) for name in (roles.router, roles.experts))
    # Equal sizes stay equal.
    small = count, hidden, inner = min(sizes[0], EXPERTS), HIDDEN, HIDDEN if sizes[2] == sizes[1] else INNER
    new_size = dict(zip(sizes, small, strict=True))
    # The code of a module reads its sizes from attributes of any name.
    resize: Callable[[nn.Module], dict[str, Any]] = lambda m: {
        key: new_size[n] for key, n in vars(m).items() if type(n) is int and n in new_size
    }
    # Values in fp32 are those of bf16, so that stand-ins in both dtypes have the same weights.
    random = lambda i, *shape: (normal(seed + i, *shape) * shape[-2] ** -0.5).bfloat16().to(dtype)
    (name,) = (key for key, t in own_tensors(router).items() if t is not None)
    weights = {roles.up: random(1, count, hidden, 2 * inner), roles.down: random(2, count, inner, hidden)}
    shared = random_linear(seed + 3, hidden, hidden, dtype, bias=False)
    children = dict(module._modules) | {
        roles.router: stand_in(router, {name: random(0, count, hidden)}, **resize(router)),
        roles.experts: stand_in(experts, weights, **resize(experts)),
        roles.shared: stand_in(shared, {"weight": random(3, hidden, hidden)}),
    }
    return stand_in(module, {}, children, **resize(module))


def _count_choices(make: Callable[[int, torch.dtype], nn.Module], router: str) -> int | None:
    """Return the number of experts that a token chooses; None if all experts have a score, or the number varies."""
    counts, experts = set(), 0
    for seed, scale in enumerate((0.1, 1.0, 8.0)):
        x = normal(100 * seed + 50, TOKENS, HIDDEN) * scale
        scores, _ = getattr(make(100 * seed, torch.float32), router)(x)
        experts = scores.shape[1]
        counts.update((scores != 0).sum(1).tolist())
    (number, *others) = counts
    return None if others or number >= experts else number


def _reproduces(recipe: MixtureRecipe, make: Callable[[int, torch.dtype], nn.Module]) -> bool:
    """Return True if the recipe computes what the module computes, and its gradients."""
    for seed, shape in ((10, (TOKENS, HIDDEN)), (20, (2, TOKENS, HIDDEN)), (30, (1, 1, HIDDEN))):
        twin, wide = make(seed, torch.bfloat16), make(seed, torch.float32)
        x = normal(seed + 5, *shape).bfloat16()
        stock, ours = run_forward(twin, x), recipe(twin, x)
        exact, ours_in_fp32 = run_forward(wide, x.float()), recipe(wide, x.float())
        has_form = type(exact) is tuple and len(exact) == 2 and torch.equal(exact[1], ours_in_fp32[1])
        has_form = has_form and stock[0].dtype == ours[0].dtype and torch.equal(stock[1], ours[1])
        reproduces = has_form and is_as_exact(stock[0], ours[0], exact[0], ours_in_fp32[0])
        if not record(reproduces, recipe, twin, [x], ours[0], stock[0]):
            return False
        leaves = [x.float(), *wide.parameters()]
        run = lambda f, leaves=leaves, wide=wide: gradients(functools.partial(f, wide, leaves[0]), leaves)
        stock_gradients, our_gradients = run(type(wide).forward), run(recipe)
        reproduces = same_gradients(our_gradients, stock_gradients)
        if not record(reproduces, recipe, wide, [x], our_gradients, stock_gradients, mode="gradients"):
            return False
    return True


def recognise_mixture(module: nn.Module) -> MixtureRecipe | str | None:
    """Recognise a mixture that runs every expert on every token."""
    if (found := _find_roles(module)) is None:
        return None
    roles, sizes = found
    if any(map(is_changed, getattr(module, roles.experts).modules())):
        return f"has hooks on {roles.experts}, or their forward was replaced"
    if (reach := explore(module, searched=(roles.router, roles.experts))).reason:
        return reach.reason

    def find() -> MixtureRecipe | str:
        make = functools.partial(_small_mixture, module, roles, sizes)
        if (number := _count_choices(make, roles.router)) is None:
            return DIFFERENT
        activations = [activation for activation, (_, _, width) in ACTIVATIONS.items() if width == 2]
        candidates = (MixtureRecipe(roles, number, activation) for activation in activations)
        return next((candidate for candidate in candidates if _reproduces(candidate, make)), DIFFERENT)

    return run_probes(find, module, reach)
