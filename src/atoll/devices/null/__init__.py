"""Null devices: they take a given time and compute nothing, under a real worker.

They show what a control plane costs with thousands of devices, hundreds of hosts in one process. Messages, plans,
stores, order and completions are those of every worker; the devices (`backend`) are null's own, behind
`devices.device.DeviceBackend`. Their hosts (`engines.null_hosts`) have a network and a clock of their own, behind
`worker.host_network.HostNetwork` and `worker.completions.Watcher`. Nothing here imports JAX.
"""
