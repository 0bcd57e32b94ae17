"""RMSNorm and LayerNorm, with and without the addition before them."""
