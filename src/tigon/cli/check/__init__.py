"""`tigon check`: whether everything holds on the user's own device, with a file to attach to an issue.

`calls` is a table of calls of each op, and `op_checks` compares them with eager code and times them. `model_checks`
trains tiny models of transformers, stock and patched, and `fast_path_checks` tries the faster ways of launching and
multiplying. `report` has outcomes, tables and the document for the file. `command` runs the parts in their order.
"""
