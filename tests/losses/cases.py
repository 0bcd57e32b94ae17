"""Random tokens for the tests of losses, padded and packed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Tokens:
    """Padded tokens [N, L]: prompts at the start of a row, then completions with gaps, then padding.

    `cu_seqlens` is None for padded tokens, and a tensor for the packed tokens that `packed` returns.
    """

    mask: Tensor
    generator: torch.Generator
    dtype: torch.dtype
    cu_seqlens: Tensor | None = None
    order: Tensor | None = None
    draws: dict[str, Tensor] = field(default_factory=dict)

    def normal(self, name: str, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Return the values [N, L] of that name: zero where the mask is False."""
        if name not in self.draws:
            values = torch.randn(self.mask.shape, generator=self.generator, dtype=torch.float64) * scale + mean
            self.draws[name] = torch.where(self.mask, values, 0.0).to(self.dtype)
        return self.draws[name]

    def log_probs(self, name: str = "policy", spread: float = 0.7) -> Tensor:
        """Return log-probabilities, near each other for all names."""
        base = self.normal("base", 1.5, -3.0).clamp(max=-1.0)
        return torch.where(self.mask, (base + self.normal(name, spread)).clamp(max=-0.01), 0.0)

    def per_sequence(self, name: str) -> Tensor:
        """Return normal values [N]."""
        if name not in self.draws:
            values = torch.randn(len(self.mask), generator=self.generator, dtype=torch.float64)
            self.draws[name] = values.to(self.dtype)
        return self.draws[name]

    @property
    def lengths(self) -> list[int]:
        return self.mask.sum(-1).tolist()


def tokens(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0, empty: tuple[int, ...] = ()
) -> Tokens:
    """Return `rows` sequences of random lengths. The rows `empty` have no token that counts."""
    generator = torch.Generator().manual_seed(seed + 1000 * rows + columns)
    position = torch.arange(columns).expand(rows, columns)
    start = torch.randint(0, max(columns // 3, 1), (rows, 1), generator=generator)
    length = torch.randint(1, columns + 1, (rows, 1), generator=generator)
    has_gap = torch.rand(rows, columns, generator=generator) < 0.1
    mask = (position >= start) & (position < (start + length).clamp(max=columns)) & ~has_gap
    mask[torch.arange(rows), start[:, 0]] = True
    for row in empty:
        mask[row] = False
    return Tokens(mask, generator, dtype)


def pack(mask: Tensor, *values: Any) -> tuple[Tensor, ...]:
    """Return cu_seqlens [N + 1], the packed mask and the packed values, without the padding after each row.

    Values that are not [N, L] stay as they are.
    """
    columns = mask.shape[1]
    ends = torch.where(mask, torch.arange(1, columns + 1), 0).amax(-1)
    is_kept = torch.arange(columns) < ends[:, None]
    cu_seqlens = torch.cat((ends.new_zeros(1), ends.cumsum(0)))
    packed = [x[is_kept] if isinstance(x, Tensor) and x.shape == mask.shape else x for x in values]
    return cu_seqlens, mask[is_kept], *packed
