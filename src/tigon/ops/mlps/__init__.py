"""Activations of MLPs, whole gated MLPs, and several projections of one input."""
