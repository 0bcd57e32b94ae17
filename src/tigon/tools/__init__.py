"""The command line: demo, benchmarks, plan, inspection, and compilation for chips that are not here."""
