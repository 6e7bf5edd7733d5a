"""Channels over socket pairs, as in the tests of `transfers`."""

from tests.transfers.conftest import no_descriptor_leaks, ends, raw, unix_ends

__all__ = ["no_descriptor_leaks", "ends", "raw", "unix_ends"]
