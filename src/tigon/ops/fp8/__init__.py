"""Products in FP8, on request: quantisation, linear layers and gated MLPs whose products run on the FP8 units."""
