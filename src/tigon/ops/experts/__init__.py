"""MLPs of a mixture of experts: routing, grouped products and the activation between them."""
