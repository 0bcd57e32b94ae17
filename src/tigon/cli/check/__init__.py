"""`tigon check`: whether everything holds on the user's own device, with a file to attach to an issue.

| file | contents |
|---|---|
| `command` | the options of the command |
| `session` | the order of the work, the progress, the file, and the last line |
| `outcome` | the outcome of one check, and the clock of the whole run |
| `op_checks` | the accuracy of every op |
| `model_checks` | tiny models of transformers, stock and patched |
| `fast_path_checks` | the self-checks of the faster ways of launching and multiplying |
| `speed` | the speed of every op, beside the copy and the matrix product of the device |
| `check_report` | tables for the terminal, and the document for the file |
"""
