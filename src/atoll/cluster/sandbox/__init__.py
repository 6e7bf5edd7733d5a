"""The sandbox of processes that run code of a tenant, and the mechanisms of this system for one."""
