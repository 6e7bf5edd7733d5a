"""Child processes, lifelines, leases, and the start of processes."""
