"""`benchmarks.ops` compares every op with other implementations. It checks the results before it times the op.

`cases` lists what is measured, `eager` has the code that models run, `peers` call other packages, `floor` computes the
matrix products alone, and `providers` lists all implementations of an op. `runner` runs one case with `accuracy` and
`measure`, and `session` is one run from its options on. An op appears here as soon as its workload has `bench_shapes`.
"""
