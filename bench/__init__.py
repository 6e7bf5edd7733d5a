"""Measures Atoll beside its peers, in turn, in one run: `python -m bench` (see bench/README.md)."""
