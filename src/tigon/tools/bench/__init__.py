"""`tigon bench`: every op beside its peers, checked before it is timed.

`cases` (what is measured), `providers` (who computes it), `accuracy` (is it right), `measure` (how long, how much),
`runner` (one case), `against` (another revision), `report` and `plots` (what is left behind), `session` (one run),
`command` (the command line).

An op is a row in `cases.OPS` (inputs, floor), rows in `cases.CASES` (shapes of models) and a row in
`providers.PROVIDERS`; its exact result is eager code in fp32 unless `accuracy.exact_results` knows better.
"""
