"""`benchmarks.train`: whole training steps of one model, stock and with each of its peers.

This is the training program (`benchmarks.training`) for several providers, sizes and rounds.

command       the options, the order of the work, and the printed output
train_plan    turns options into runs, and refuses bad options
train_runs    the runs of all rounds, and their progress
train_report  tables, train.json, train.md, throughput.png, memory.png, loss.png
"""
