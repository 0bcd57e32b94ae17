"""`tigon bench train`: whole training steps of one model, stock and with each of its peers.

It is the training program (`tigon.tools.training`) over providers, sizes and rounds.

command    the options
plan       options to a plan: all that can be refused
search     which sizes are tried, until out of memory and around it
runner     processes, rounds, progress
report     rows, comparison of curves, tables, train.json, train.md
plots      throughput.png, memory.png, loss.png
"""
