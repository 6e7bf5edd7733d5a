"""The one controller: who may do what, where things are, and in which order gangs run.

The decisions (`resources`, `scheduler`, `directory`, `functions`, `core`) are state machines without I/O or clock:
events in, messages out. The room `controller_process` gives them sockets.
"""
