"""The training program. `tigon demo`, `tigon bench train` and the Medusa example are presets of it.

A command has a `TrainingRun` for each process, which trains as its job says and answers each point with an event.

job          a job, and the points at which it is trained                              (parent and child)
child        a process or a group of them: start it, send points, end it               (parent)
runner       the loop over the runs and their points                                   (parent)
search       the sizes that a sweep tries                                              (parent)
measurement  the measurements of a run at one size, and the comparison of losses       (parent)
figures      the look of pictures; curves of losses, bars, lines of a sweep            (parent)
answers      how a process takes points, answers, fails and ends                       (child)
worker       the training of one model                                                 (child)
resident     peak memory of a process on a CPU                                         (child)
sharding     a model and its optimizer under FSDP2                                     (child)
providers    the change that each provider makes to a model                            (parent and child)
models       a model of random weights, and its config as JSON                         (parent and child)
text         text, tokenizer, cache, batches                                           (parent and child)
records      dataclasses and reports as JSON                                           (parent and child)
"""
