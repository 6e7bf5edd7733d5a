"""Null devices: they take a given time and compute nothing, under a real worker.

For what a control plane costs at sizes that nobody has at hand: thousands of devices, hundreds of hosts in one process.
Messages, plans, stores, order and ends are those of every worker; only what stands below `Backend` is not.
"""
