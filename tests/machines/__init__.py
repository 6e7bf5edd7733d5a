"""Simulate several machines on one Linux machine, for tests of clusters on many.

This needs root, iproute2 and util-linux.
"""
