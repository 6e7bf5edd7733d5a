"""Settings, topology, lifecycle and slices of a cluster, and the processes and sandboxes of all its parts."""
