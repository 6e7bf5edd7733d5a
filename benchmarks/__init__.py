"""Measures Atoll beside its peers, in turn, in one run: `python -m benchmarks` (see benchmarks/README.md)."""
