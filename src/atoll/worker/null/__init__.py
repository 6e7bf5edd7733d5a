"""Null devices: they take a given time and compute nothing, under a real worker.

They show what a control plane costs with thousands of devices, hundreds of hosts in one process. Messages, plans,
stores, order and completions are those of every worker; the devices (`backend`), the network between hosts (`network`)
and the clock that tells of completions (`host`) are null's own, behind `worker.device.DeviceBackend`,
`worker.host_network.HostNetwork` and `worker.completions.Watcher`. Nothing here imports JAX.
"""
