"""External leases: one controller of a cluster at a time, decided by a server outside of the cluster."""
