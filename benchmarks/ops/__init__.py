"""`benchmarks.ops` compares every op with other implementations. It checks the results before it times the op.

`cases` lists what is measured, `eager` has the code that models run, `peers` and `mixer_peers` call other packages,
`floor` computes the matrix products alone, and `providers` lists all implementations of an op. `accuracy` checks
results, `measure` measures time and memory, `runner` runs one case, and `against` imports another revision of Tigon.
`report` writes files. `session` is one run from its options on.

The ops and their shapes come from `benchmarks.workloads`. An op appears here as soon as its workload has
`bench_shapes`; entries in `eager` and `providers` add code of models and other packages.
"""
