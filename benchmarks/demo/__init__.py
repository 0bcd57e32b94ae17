"""`benchmarks.demo`: train a Hugging Face decoder twice from one seed, stock and patched, and compare.

The demo is the training program (`benchmarks.training`) with a small preset, two loss curves and a tolerance.

command       the options, the order of the work, and the printed output
demo_presets  the model and the settings of each kind of device
demo_plan     turns options into two runs, and refuses bad options
demo_runs     the two runs and their progress
demo_report   comparison, tolerance, table, report.json, loss.png, speed_memory.png
"""
