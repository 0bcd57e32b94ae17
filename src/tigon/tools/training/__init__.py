"""The training program: `tigon demo`, `tigon bench train` and the Medusa example are presets of it.

A command starts a process for each run, which trains as its job says and answers with events.

job        a job, and the points that follow it                                   (both)
child      a process or a group of them: start, ask, end                          (parent)
answers    how a process takes points, answers, fails and ends; what ranks share  (child)
worker     one training run                                                       (child)
providers  what each provider does to a model                                     (both)
sharding   a model and its optimizer under FSDP2                                  (child)
models     a model of random weights, and its config as JSON                      (both)
resident   peak memory of a process on a CPU                                      (child)
text       text, tokenizer, cache, batches                                        (both)
records    dataclasses as JSON
figures    the look of a picture
"""
