"""Runs the tests of JAX and of its libraries on stock JAX and on Atoll, and tells where they differ.

    python -m scripts.conformance --jax CHECKOUT --suite core

`suites` says which test files there are, `projects` where those of other projects come from, `environments` what they
run against, `runner` runs one file whatever its tests do to the process, `baseline` keeps stock results, `comparison`
holds the two against each other, `reasons` explains known differences, `screen` and `markdown` show them.
"""
