"""LayerNorm, RMSNorm, and RMSNorm of the sum of an input and a residual."""
