"""Whole training steps of one model, stock and with each of its peers. The demo is a preset of this benchmark.

A run at one size is a process (`process`, `worker`), or a group of them under FSDP2; `trl` lets TRL train the model.
`providers` change the stock model, and `models` and `text` make the model and its data. `cases` has options by name,
`plan` turns options into runs, `command` trains them, `measurement` holds their results, and `report` writes them.
"""
