"""What a cluster says of itself, and the one model of it that all that show a cluster read.

`report` makes the controller's report, `snapshot` is its type, `watch` follows it over time. What they are made of is
counted where it happens: `scheduling.tallies`, `history`, `load`.
"""
