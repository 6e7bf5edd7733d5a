"""Settings, topology, lifecycle, slices, processes, sandboxes and usage records of a cluster."""
