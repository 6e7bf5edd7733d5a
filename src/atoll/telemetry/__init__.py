"""The state of a cluster as data, and the model of it that every display reads.

`report` builds the controller's report, `snapshot` is its type, and `watch` follows it over time. The counts come from
`state.tallies`, `history` and `load`.
"""
