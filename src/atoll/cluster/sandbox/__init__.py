"""The sandbox of processes that run code of a tenant, and what this system offers to build one."""
