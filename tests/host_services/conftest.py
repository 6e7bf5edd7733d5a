"""Fixtures: channels over socket pairs, as in the tests of `transfers`."""

from tests.transfers.conftest import ends, no_descriptor_leaks, raw, unix_ends

__all__ = ["ends", "no_descriptor_leaks", "raw", "unix_ends"]
