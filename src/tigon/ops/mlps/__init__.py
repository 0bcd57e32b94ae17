"""Activations of MLPs, whole gated MLPs, and several linear layers with the same input."""
