"""The command line of the installed package: inspection of models, the plan of memory, and the check of a machine."""
