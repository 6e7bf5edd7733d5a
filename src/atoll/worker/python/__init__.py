"""Colocated Python on a host: one process for each session, beside the worker and never in it."""
