"""The command line: demo, benchmarks, plan, inspection, and compilation for chips that this machine does not have."""
