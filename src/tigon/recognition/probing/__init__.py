"""Run stand-ins of modules on probes, and compare the results with those of candidates."""
