"""Optimizers that update many tensors in one launch."""
