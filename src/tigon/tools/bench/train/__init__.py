"""`tigon bench train`: whole training steps of one model, stock and with each of its peers.

command    the options                                                  (parent)
plan       options to a plan: all that can be refused                   (parent)
search     which sizes are tried, until out of memory and around it     (parent)
runner     processes, rounds, progress                                  (parent)
report     rows, comparison of curves, tables, train.json, train.md     (parent)
plots      throughput.png, memory.png, loss.png                         (parent)
job        what a process is asked for                                  (both)
providers  what each name does to a model                               (both)
worker     one process, or one rank of a group                          (child)
sharding   a model and its optimizer under FSDP2                        (child)
"""
