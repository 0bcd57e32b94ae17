"""Compare the fp32 training curve of a run with the curve of the stock model.

A curve holds, for every step, the loss and two numbers for every parameter's gradient: its norm, and its projection on
a fixed vector of random signs. The loss alone cannot show a wrong gradient: AdamW divides each gradient by its own
size, so a gradient that is scaled by a constant gives the same updates.

The limit comes from the stock model. In several *moved* runs, it is trained from parameters that are moved by one unit
in the last place, to a neighbouring number in fp32. The distance of a correct run from stock is at most a small factor
times the distance of the furthest moved run.

The router of a mixture of experts chooses experts by the size of its scores. If two scores are almost equal, one unit
in the last place sends a token to another expert, and from there on the two runs train different functions. Such a
choice is called a *flip*. Curves are compared up to the first flip, and the gap between the scores of this flip must
not be larger than the change of the scores by one unit in the last place, times a small factor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EPS = torch.finfo(torch.float32).eps
# One unit in the last place moves the gradients of the tiny qwen3 by up to 1.6e-3 within 32 steps at a rate of 1e-3,
# and by 4e-5 at 1e-4. The check sees a relative error of 1e-4 in every step only at the lower rate.
STEPS, RATE, SEEDS = 32, 1e-4, 4

# The distance of the furthest of four moved runs is random. In 139 types on a CPU, a fifth moved run reached at most
# 0.43 of the loss's limit and 0.87 of a gradient's limit.
FACTOR = 3.0
# The smallest limits: 5e-7 of the loss, and 8e-6 of the gradient's norm.
LOSS_FLOOR = 4 * EPS
GRADIENT_FLOOR = 64 * EPS

Change = Callable[[nn.Module], object]


class Choices(TorchFunctionMode):
    """Record the scores and the positions of every choice by size: routers, groups of experts, indexers."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []  # [..., experts] each
        self.positions: list[Tensor] = []  # [..., choices] each

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        if function in (torch.topk, Tensor.topk):
            self._record(outputs.indices, *args, **kwargs)
        elif function in (torch.argmax, Tensor.argmax):
            self._record_largest(outputs, *args, **kwargs)
        return outputs

    def _record_largest(self, positions: Tensor, input: Tensor, dim: int | None = None, keepdim: bool = False) -> None:
        # Without a dimension, argmax looks at all elements and chooses nothing per token.
        if dim is not None:
            self._record(positions if keepdim else positions.unsqueeze(dim), input, 1, dim)

    def _record(self, positions: Tensor, input: Tensor, k: int, dim: int = -1, **options: object) -> None:
        if not input.is_floating_point() or k >= input.shape[dim]:
            return
        scores = input.detach().movedim(dim, -1)
        if (scores != 0).sum(-1).max() <= k:
            # A router has set all other scores to zero. Tigon reads its choices from these scores.
            return
        self.scores.append(scores.clone())
        self.positions.append(positions.movedim(dim, -1).clone())


@dataclass
class Curve:
    """The losses, gradients and choices of one run."""

    losses: Tensor  # [steps], fp64
    norms: Tensor  # [steps, parameters], fp64
    projections: Tensor  # [steps, parameters], fp64
    choices: Choices
    # For each step, the number of choices up to its end.
    ends: list[int]


@dataclass
class Flip:
    """The first choice of a run that differs from the choice of the stock run."""

    choice: int
    step: int
    # The largest gap, over the tokens with another choice, between the last chosen and the first unchosen score.
    gap: float


@dataclass
class Comparison:
    """The distance of a run from stock, and the distances of the moved runs from stock.

    A share is the distance divided by the limit, at the step where the quotient is largest. The run passes if all
    shares are at most 1.
    """

    # The number of compared steps, which are those before the first flip.
    steps: int
    # The largest relative distance of the losses, for the run and for each moved run.
    loss: float
    loss_moved: list[float]
    loss_share: float
    # The largest distance of each parameter's gradient, relative to its norm, for the run and the furthest moved run.
    gradients: dict[str, float]
    gradients_moved: dict[str, float]
    gradient_shares: dict[str, float]
    first_loss: float
    last_loss: float
    flip: Flip | None
    # FACTOR times the change of the scores of the flip by one unit in the last place.
    flip_limit: float | None
    # The step of the first flip of each moved run that has a flip.
    flips_moved: list[int]

    def failures(self) -> list[str]:
        """Return a sentence for every limit that the run exceeds."""
        sentences = []
        if not self.loss_share <= 1:
            sentences.append(
                f"The loss lies up to {self.loss:.2g} from stock, {self.loss_share:.3g} times the limit; stock moved "
                f"by one unit in the last place lies up to {max(self.loss_moved):.2g} from it."
            )
        for name, share in self.gradient_shares.items():
            if not share <= 1:
                sentences.append(
                    f"The gradient of {name} lies up to {self.gradients[name]:.2g} from stock, {share:.3g} times the "
                    f"limit; with stock moved by one unit in the last place, up to {self.gradients_moved[name]:.2g}."
                )
        if self.flip is not None and self.flip_limit is not None and not self.flip.gap <= self.flip_limit:
            sentences.append(
                f"A choice of step {self.flip.step} differs from stock's, though its scores lie {self.flip.gap:.2g} "
                f"apart; one unit in the last place moves them by {self.flip_limit / FACTOR:.2g}."
            )
        return sentences


def perturb(model: nn.Module, seed: int) -> None:
    """Move every parameter to one of its two neighbours in fp32, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            up = (torch.rand(p.shape, generator=generator) < 0.5).to(p.device)
            neighbour = torch.nextafter(p, torch.where(up, torch.inf, -torch.inf))
            # Zeros stay zero, because the neighbour of zero is a subnormal number, which training treats as zero.
            p.copy_(torch.where(p == 0, p, neighbour))


def train(model: nn.Module, batch: dict, steps: int = STEPS, rate: float = RATE) -> Curve:
    """Train `model` in place and return its curve."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    signs = [(torch.rand(p.shape, generator=generator) < 0.5).to(p.device).float() * 2 - 1 for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    choices, ends, losses, norms, projections = Choices(), [], [], [], []
    zero = torch.zeros((), device=parameters[0].device)
    for step in range(steps):
        # Every run has the same dropout.
        torch.manual_seed(step)
        with choices:
            loss = model(**batch).loss
        ends.append(len(choices.scores))
        loss.backward()
        losses.append(loss.detach())
        gradients = [p.grad for p in parameters]
        norms.append(torch.stack([zero if g is None else g.norm() for g in gradients]))
        products = [zero if g is None else (g * s).sum() for g, s in zip(gradients, signs, strict=True)]
        projections.append(torch.stack(products))
        optimizer.step()
        optimizer.zero_grad()
    stacks = [torch.stack(rows).double().cpu() for rows in (losses, norms, projections)]
    return Curve(*stacks, choices=choices, ends=ends)


def _gaps(scores: Tensor, count: int) -> Tensor:
    """Return the gap between the last of `count` chosen scores and the first unchosen one; 0 if both are masked."""
    top = scores.float().topk(count + 1, dim=-1).values
    return (top[..., count - 1] - top[..., count]).nan_to_num(0.0)


def first_flip(run: Curve, stock: Curve) -> Flip | None:
    """Return the first choice in which `run` differs from `stock`."""
    pairs = zip(run.choices.scores, run.choices.positions, stock.choices.scores, stock.choices.positions, strict=False)
    for i, (scores, positions, stock_scores, stock_positions) in enumerate(pairs):
        different = (positions.sort(-1).values != stock_positions.sort(-1).values).any(-1)
        if not different.any():
            continue
        count = positions.shape[-1]
        gaps = _gaps(stock_scores, count)
        # If scores are exactly equal in both runs, as masked scores are, another choice among them has no effect.
        different &= (gaps > 0) | (_gaps(scores, count) > 0)
        if different.any():
            step = next(s for s, end in enumerate(stock.ends) if i < end)
            return Flip(i, step, gaps[different].max().item())
    assert run.ends == stock.ends, "the run makes more or fewer choices than stock"
    return None


def _distances(run: Curve, stock: Curve) -> Tensor:
    """Return the distance of the loss and of every gradient at every step, [steps, 1 + parameters].

    The loss is relative to stock's loss, and a gradient to the norm of stock's gradient.
    """
    loss = (run.losses - stock.losses).abs() / stock.losses.abs()
    gradients = torch.maximum((run.norms - stock.norms).abs(), (run.projections - stock.projections).abs())
    distances = torch.cat((loss[:, None], gradients / stock.norms.clamp(min=1e-30)), 1)
    # A NaN is infinitely far from any number.
    return distances.nan_to_num(nan=torch.inf)


def compare(
    model: nn.Module, change: Change, batch: dict, steps: int = STEPS, rate: float = RATE, seeds: int = SEEDS
) -> Comparison:
    """Train stock, stock moved by one unit in the last place, and the changed model, and compare their curves.

    Args:
        model: The stock model, whose parameters are not changed.
        change: Patches a copy of the model before its training.
    """

    def train_variant(prepare: Change) -> Curve:
        variant = copy.deepcopy(model)
        prepare(variant)
        return train(variant, batch, steps, rate)

    names = [name for name, _ in model.named_parameters()]
    stock, run = train_variant(lambda variant: None), train_variant(change)
    moved = [train_variant(lambda variant, seed=seed: perturb(variant, seed)) for seed in range(seeds)]
    flip, flips = first_flip(run, stock), [first_flip(m, stock) for m in moved]
    ends = [steps if f is None else f.step for f in flips]
    # After the last flip of the moved runs, nothing shows the effect of one unit in the last place.
    horizon = min(steps if flip is None else flip.step, max(ends))
    flip_limit = None
    if flip is not None:
        # Until its own first flip, a moved run shows how one unit in the last place changes the scores.
        unit = [
            (m.choices.scores[flip.choice] - stock.choices.scores[flip.choice]).abs().nan_to_num(0.0).max().item()
            for m, f in zip(moved, flips, strict=True)
            if f is None or f.choice >= flip.choice
        ]
        flip_limit = FACTOR * max(unit) if unit else None
    distances = _distances(run, stock)[:horizon]
    noise = torch.stack([_distances(m, stock)[:horizon] for m in moved])  # [seeds, steps, 1 + parameters]
    for i, end in enumerate(ends):
        # After its flip, a moved run trains another function, so its distance is no longer a rounding error.
        noise[i, end:] = 0.0
    floor = torch.full((len(names) + 1,), GRADIENT_FLOOR, dtype=noise.dtype)
    floor[0] = LOSS_FLOOR
    if horizon == 0:
        distances, noise = torch.zeros(1, len(names) + 1), torch.zeros(len(moved), 1, len(names) + 1)
    # The limit of a step is the largest distance up to this step, because the noise of one run at one step is random.
    shares = (distances / (FACTOR * noise.amax(0).cummax(0).values + floor)).amax(0).tolist()
    largest, moved_by = distances.amax(0).tolist(), noise.amax((0, 1)).tolist()
    return Comparison(
        steps=horizon,
        loss=largest[0],
        loss_moved=noise[:, :, 0].amax(1).tolist(),
        loss_share=shares[0],
        gradients=dict(zip(names, largest[1:], strict=True)),
        gradients_moved=dict(zip(names, moved_by[1:], strict=True)),
        gradient_shares=dict(zip(names, shares[1:], strict=True)),
        first_loss=stock.losses[0].item(),
        last_loss=stock.losses[-1].item(),
        flip=flip,
        flip_limit=flip_limit,
        flips_moved=[f.step for f in flips if f is not None],
    )
