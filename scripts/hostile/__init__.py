"""A hostile tenant beside an honest training of another: `python -m scripts.hostile --help`."""
