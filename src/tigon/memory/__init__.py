"""Save less memory for backward: recompute saved tensors, move them to the host, or run layers twice."""
