"""Losses of hidden states and the weight of the head. The logits of all tokens never exist at the same time."""
