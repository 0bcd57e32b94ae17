"""The training program. `benchmarks.demo`, `benchmarks.train` and the Medusa example are presets of it.

A command has a `TrainingRun` for each process. A job describes the model and its training; a point is the size of a
step and the number of steps to train next. The process answers each point with an event.

program          options, and the way from options to an exit code                      (parent)
job              a job, and the points at which it is trained                          (parent and child)
child            a process or a group of them: start it, send points, end it           (parent)
turns            the loop over the runs and their points                               (parent)
search           the sizes that a sweep tries                                          (parent)
measurement      the measurements of a run at one size, and the comparison of losses   (parent)
figures          the look of pictures; curves of losses, panels of bars and sweeps     (parent)
answers          how a process takes points, answers, fails and ends                   (child)
worker           the training of one model                                             (child)
resident         peak memory of a process on a CPU                                     (child)
model_providers  the change that each provider makes to a model                        (parent and child)
lora             adapters, frozen weights, weights in 4 bits                           (parent and child)
unsloth_model    the model with adapters that Unsloth loads                            (child)
models           a model of random weights, its config as JSON, its shards             (parent and child)
text             text, tokenizer, cache, batches                                       (parent and child)

`tigon.cli.output` writes tables and JSON.
"""
