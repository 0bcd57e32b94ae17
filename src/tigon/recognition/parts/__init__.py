"""Recognisers and recipes of norms, MLPs, experts, rotary embeddings, linear layers with adapters, and FP8."""
