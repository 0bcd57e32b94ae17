"""`tigon check`: whether everything holds on the user's own device, with a file to attach to an issue.

`command` runs the parts in their order, and `report` has their outcomes.
"""
