"""Processes: children, lifelines, leases, and what each process does when it starts."""
