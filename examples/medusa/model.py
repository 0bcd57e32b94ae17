"""Medusa: a language model with further heads, of which head k predicts the token k positions after the next one.

    logits_0 = W_0 h                                    the model's own head
    logits_k = W_k (h + silu(B_k h + b_k))              one residual block, and as many rows as the vocabulary has
    loss     = L_0 + 0.2 sum_k 0.8^k L_k                stage 2: everything is trained
    loss     = sum_k 0.8^k L_k                          stage 1: the heads alone

L_k is the cross entropy of the tokens k + 1 positions later. Cai et al., "Medusa: Simple LLM Inference Acceleration
Framework with Multiple Decoding Heads", arXiv:2401.10774.

Shapes: B sequences of S tokens, hidden H, vocabulary V, K heads besides the model's own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon

IGNORED = -100
# The loss of head k has the weight DECAY^k, and in stage 2 also HEADS_WEIGHT.
DECAY = 0.8
HEADS_WEIGHT = 0.2


class Head(nn.Module):
    """Maps hidden states [B, S, H] to logits [B, S, V], or with targets [B, S] to a loss without whole logits."""

    def __init__(self, hidden: int, vocabulary: int, block: bool) -> None:
        super().__init__()
        self.block = nn.Linear(hidden, hidden) if block else None
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        if block:
            # The block begins as the identity.
            nn.init.zeros_(self.block.weight)
            nn.init.zeros_(self.block.bias)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.block is not None:
            hidden = hidden + F.silu(self.block(hidden))
        if targets is None:
            return self.output(hidden)
        return tigon.linear_cross_entropy(hidden, self.output.weight, targets, ignore_index=IGNORED)


class Medusa(nn.Module):
    """A trunk of transformers, its own head and K more heads; the forward pass returns the loss of a stage.

    With `fused`, each head computes its loss, one head after the other, and only a chunk of one head's logits exists at
    a time. Otherwise the losses are those of Medusa's training code: the logits of all heads are one tensor, and slices
    of it go to the loss in fp32.
    """

    def __init__(self, trunk: nn.Module, heads: int, stage: int, fused: bool) -> None:
        super().__init__()
        hidden, vocabulary = trunk.config.hidden_size, trunk.config.vocab_size
        self.trunk, self.stage, self.fused = trunk, stage, fused
        self.heads = nn.ModuleList(Head(hidden, vocabulary, block=k > 0) for k in range(heads + 1))
        with torch.no_grad():
            nn.init.normal_(self.heads[0].output.weight, std=0.02)
            for head in self.heads[1:]:
                head.output.weight.copy_(self.heads[0].output.weight)
        if stage == 1:
            trunk.requires_grad_(False)
            self.heads[0].requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss, [], of token ids [B, S]."""
        with torch.set_grad_enabled(self.stage == 2 and torch.is_grad_enabled()):
            hidden = self.trunk(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, S, H]
        head_indices = range(1 if self.stage == 1 else 0, len(self.heads))
        losses = (
            self.fused_losses(hidden, input_ids, head_indices)
            if self.fused
            else self.losses(hidden, input_ids, head_indices)
        )
        scale = 1.0 if self.stage == 1 else HEADS_WEIGHT
        return sum(loss * (scale * DECAY**k if k else 1.0) for k, loss in zip(head_indices, losses, strict=True))

    def fused_losses(self, hidden: Tensor, labels: Tensor, head_indices: range) -> list[Tensor]:
        """Return the losses of all heads. Shifted targets replace slices of `hidden`, so that nothing is copied."""
        targets = [F.pad(labels[:, k + 1 :], (0, k + 1), value=IGNORED) for k in head_indices]
        return [self.heads[k](hidden, target) for k, target in zip(head_indices, targets, strict=True)]

    def losses(self, hidden: Tensor, labels: Tensor, head_indices: range) -> list[Tensor]:
        """Return the losses of all heads as Medusa's training code computes them."""
        logits = torch.stack([self.heads[k](hidden) for k in head_indices])  # [K, B, S, V]
        results = []
        for i, k in enumerate(head_indices):
            shifted_logits = logits[i, :, : -(k + 1)].contiguous().view(-1, logits.shape[-1])
            results.append(F.cross_entropy(shifted_logits.float(), labels[:, k + 1 :].reshape(-1)))
        return results
