"""Measures Atoll beside its peers, in turn, in one run: `atoll bench` (see bench/README.md)."""
