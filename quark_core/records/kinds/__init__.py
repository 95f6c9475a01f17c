"""The types of records, a module for those of one subject; each module here is found by itself.

A new one is a class of `StreamRecord` with a KIND and a TABLE of its own, its fields, and RULES
for those that are not free text or any number; see `ParameterSummaryRecord` in `diagnostics`. It
is logged by `session.write([NewRecord(*start_fields(None), ...)])` and read by
`session.open_run.read(kind, Query())`.
"""
