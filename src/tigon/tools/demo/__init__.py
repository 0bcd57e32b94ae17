"""The main job, `tigon demo`: train a Hugging Face decoder twice from one seed, stock and patched, and compare.

It is the training program (`tigon.tools.training`) with a small preset, both curves and a tolerance.

command   the options and what may be given to them
presets   what is trained on which device; model configs
plan      options to two runs: all that can be refused
runner    two processes and their progress
report    comparison, tolerance, table, report.json
plots     loss.png, speed_memory.png
"""
