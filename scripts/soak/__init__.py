"""A cluster under load while its processes are killed: `python -m scripts.soak --help`."""
