"""Python processes beside a worker, which run users' functions: their start, their sessions, and the link to them."""
