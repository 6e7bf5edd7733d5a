"""Measures Atoll beside its peers, in turn, in one run: `python -m benchmarks` (see bench/README.md)."""
