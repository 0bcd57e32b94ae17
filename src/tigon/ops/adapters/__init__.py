"""Low-rank adapters: linear layers, several linear layers of one input, and gated MLPs."""
