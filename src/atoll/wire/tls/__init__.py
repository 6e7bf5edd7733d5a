"""Mutual TLS between Atoll's processes."""
