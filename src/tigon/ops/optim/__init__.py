"""Optimizers: one kernel for the whole step of a tensor."""
