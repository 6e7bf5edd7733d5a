"""The controller of a cluster: it decides who may do what, where things are, and in which order gangs run.

Its decisions are state machines without I/O or clock: events in, actions out. The package `controller_process` connects
them to sockets.
"""
