"""The one controller: who may do what, where things are, and in which order gangs run.

The decisions (`resources`, `scheduler`, `directory`, `functions`, `core`) are state machines without I/O or clock:
events in, messages out. `main` gives them sockets.
"""
