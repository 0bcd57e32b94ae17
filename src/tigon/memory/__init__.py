"""Less memory for backward: saved tensors that backward recomputes, and saved tensors that move to the host."""
