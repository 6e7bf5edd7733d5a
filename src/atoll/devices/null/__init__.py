"""Null devices, which take a given time and compute nothing, below a real worker.

They measure the cost of the control plane with thousands of devices, hundreds of hosts per process. Only the devices
(`null_backend`) and the network and clock of their hosts (`engines.null_hosts`) are simulated. Messages, plans, stores,
order and completions are those of every worker. Nothing here imports JAX.
"""
