"""Engines start and watch Atoll's processes, and nothing else."""
