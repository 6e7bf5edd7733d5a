"""Executables of IFRT clients: compiled functions, traced programs, Python on hosts, checkpoints, profiles."""
