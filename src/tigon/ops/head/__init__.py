"""Ops on hidden states and the weight of the head: the logits never exist as a whole."""
