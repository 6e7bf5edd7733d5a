"""Calls from hosts into clients' Python: callbacks of programs and of compilations."""
