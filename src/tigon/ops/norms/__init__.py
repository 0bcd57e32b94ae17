"""RMSNorm and LayerNorm, each alone, and RMSNorm of a sum with a residual."""
