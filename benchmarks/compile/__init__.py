"""Compilation of the kernels for chips that this machine does not have, and the resources that each kernel needs."""
