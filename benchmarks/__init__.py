"""Benchmarks of the repository, and the tables that they share with the tests. The installed package has none of them.

`workloads` has the ops and their shapes, `ops` the benchmark of single ops, `train` that of whole training steps,
`demo` the comparison of a stock and a patched model, and `compile` compiles kernels for chips that are not here.
"""
