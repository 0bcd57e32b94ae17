"""Low-rank adapters: linear layers, several linear layers of one input, gated MLPs, and experts of a mixture."""
