"""The records of the controller: sessions, buffers, programs, nodes and gangs, tenants, memory, and what is counted.

Pure. `gang_states` and `buffer_states` have the states of gangs and buffers; `launch` changes them.
"""
