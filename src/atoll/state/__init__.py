"""The controller's records: sessions, buffers, programs, nodes and gangs, tenants, memory, counts and estimates.

They are pure: no I/O, clock or randomness. `gang_states` and `buffer_states` have the states of gangs and buffers, and
the `launch` package changes them.
"""
