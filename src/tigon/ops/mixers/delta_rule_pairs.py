r"""The products of pairs of tokens of a chunk, with the decay between them: of one number for all features, or of each.

    keys_ij    = sum_c k_ic k_jc exp(G_ic - G_jc)  for i > j, else 0
    queries_ij = sum_c q_ic k_jc exp(G_ic - G_jc)  for i >= j, else 0

where c is a feature, and G the cumulative sum of g in the chunk. An exponential is that of a sum of g between two
tokens, which is more precise than a difference of G, and is masked before, so that nothing overflows.

Shapes: B batch, Hk heads of q and k, R heads of v for each of them, C tokens of a chunk, Dk features of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The tokens of a block of a chunk, in which `FeaturePairs` computes the decay of each pair and each feature.
BLOCK = 16


def sum_before(x: Tensor) -> Tensor:
    """Return the sum of the rows before each row of x [..., C, D]."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


def sum_from(x: Tensor) -> Tensor:
    """Return the sum of each row of x [..., C, D] and the rows after it."""
    return x.flip(-2).cumsum(-2).flip(-2)


def sum_after(x: Tensor) -> Tensor:
    """Return the sum of the rows after each row of x [..., C, D]."""
    return sum_from(F.pad(x[..., 1:, :], (0, 0, 0, 1)))


def decays_between(g: Tensor) -> Tensor:
    """Return exp(G_i - G_j) for i >= j, else 0, as [..., C, C] for g [..., C, 1]."""
    size = g.shape[-2]
    is_later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = g.expand(*g.shape[:-1], size).tril(-1).cumsum(-2)
    return between.masked_fill(is_later, -torch.inf).exp()


class TokenPairs:
    """The pairs of a chunk in which a token decays all features alike."""

    def __init__(self, q: Tensor, k: Tensor, g: Tensor) -> None:  # [B, Hk, 1, C, Dk], same, [B, Hk, R, C, 1]
        self.q, self.k = q, k
        self.decays = decays_between(g)  # [B, Hk, R, C, C]
        self.keys = (k @ k.mT * self.decays).tril(-1)
        self.queries = q @ k.mT * self.decays

    def gradients(self, dkeys: Tensor, dqueries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dg, given the gradients of both products, which are zeros where these are."""
        # Row t of `ends` sums the pairs (i, j) over i >= t, of which those with j < t have token t between them.
        ends = sum_from(dkeys * self.keys + dqueries * self.queries)
        dkeys, dqueries = dkeys * self.decays, dqueries * self.decays
        dk = dkeys @ self.k + dkeys.mT @ self.k + dqueries.mT @ self.q
        return dqueries @ self.k, dk, ends.tril(-1).sum(-1, keepdim=True)


class FeaturePairs:
    """The pairs of a chunk in which a token decays each feature by its own number.

    The exponential does not factor into one of i and one of j, both below 1, except at a token between them. Therefore
    the pairs of a block of rows with earlier columns are products, which meet at the first row, and those of the block
    itself are computed one by one.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor) -> None:  # [B, Hk, 1, C, Dk], same, [B, Hk, R, C, Dk]
        self.q, self.k, self.g = q, k, g
        size = g.shape[-2]
        keys: list[Tensor] = []
        queries: list[Tensor] = []
        for first in range(0, size, BLOCK):
            rows, columns = slice(first, first + BLOCK), slice(0, first)
            since, until, inner = self._decays(first)
            far_keys = (k[..., columns, :] * until).mT
            pairs = (inner * k[..., rows, :].unsqueeze(-3)) @ torch.stack((k[..., rows, :], q[..., rows, :]), -1)
            for products, x, near in ((keys, k, pairs[..., 0].tril(-1)), (queries, q, pairs[..., 1])):
                far = (x[..., rows, :] * since) @ far_keys
                products.append(F.pad(torch.cat((far, near), -1), (0, size - first - BLOCK)))
        self.keys, self.queries = torch.cat(keys, -2), torch.cat(queries, -2)

    def _decays(self, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decays of a block of rows since its first row, of all columns until then, and inside of the block.

        Their shapes are [..., 16, Dk], [..., first, Dk] and [..., 16, 16, Dk].
        """
        g = self.g[..., first : first + BLOCK, :]
        square = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=g.device)
        is_earlier, is_later = square.tril(-1)[..., None], square.triu(1)[..., None]
        between = torch.where(is_earlier, g.unsqueeze(-2), 0).cumsum(-3)
        inner = between.masked_fill(is_later, -torch.inf).exp()
        return g.cumsum(-2).exp(), sum_after(self.g[..., :first, :]).exp(), inner

    def gradients(self, dkeys: Tensor, dqueries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dg, given the gradients of both products, which are zeros where these are."""
        dq, dk, dg = (torch.zeros_like(self.g) for _ in range(3))
        is_earlier = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=dg.device).tril(-1)[..., None]
        for first in range(0, dg.shape[-2], BLOCK):
            rows, columns = slice(first, first + BLOCK), slice(0, first)
            since, until, inner = self._decays(first)
            q, k, earlier_k = self.q[..., rows, :], self.k[..., rows, :], self.k[..., columns, :]
            # Pairs with earlier blocks: the rows after a token, or the columns before it, have it between them.
            far_dkeys, far_dqueries = dkeys[..., rows, columns], dqueries[..., rows, columns]
            dq_rows, dk_rows = (since * (x @ (earlier_k * until)) for x in (far_dqueries, far_dkeys))
            dk_columns = until * (far_dkeys.mT @ (since * k) + far_dqueries.mT @ (since * q))
            dg[..., rows, :] += sum_from(q * dq_rows + k * dk_rows)
            dg[..., columns, :] += sum_before(earlier_k * dk_columns)
            dk[..., columns, :] += dk_columns
            # Pairs inside of the block, [..., 16, 16, Dk].
            near_dkeys, near_dqueries = dkeys[..., rows, rows], dqueries[..., rows, rows]
            dq_near, dk_near = (torch.stack((near_dqueries, near_dkeys), -2) @ (inner * k.unsqueeze(-3))).unbind(-2)
            dq[..., rows, :] += dq_rows + dq_near
            terms = inner * (near_dkeys[..., None] * k.unsqueeze(-2) + near_dqueries[..., None] * q.unsqueeze(-2))
            dk[..., rows, :] += dk_rows + dk_near + terms.sum(-3)
            ends = (terms * k.unsqueeze(-3)).flip(-3).cumsum(-3).flip(-3)
            dg[..., rows, :] += (ends * is_earlier).sum(-2)
        return dq, dk, dg
