"""Losses of single tokens from their logits: statistics and gradients, for `cross_entropy` and for the head."""
