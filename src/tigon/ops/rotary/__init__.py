"""Rotary position embeddings, alone and after a norm of queries and keys."""
