"""Ops on logits that exist in memory: softmax, cross entropy and divergences."""
