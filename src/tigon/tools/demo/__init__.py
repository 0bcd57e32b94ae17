"""The main job, `tigon demo`: train a Hugging Face decoder twice from one seed, stock and patched, and compare.

command   the options and what may be given to them          (parent)
presets   what is trained on which device; model configs      (both)
runner    two processes and their progress                    (parent)
train     one training run, one process                       (child)
report    comparison, tolerance, table, report.json           (parent)
plots     loss.png, speed_memory.png                          (parent)
"""
