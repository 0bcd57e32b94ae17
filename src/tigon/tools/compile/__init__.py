"""Kernels compiled for chips that are not here, and the resources that each takes."""
