"""The program of a Python process, which runs users' functions. No other process imports this package."""
