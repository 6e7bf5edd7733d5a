"""Between a worker and the Python processes beside it: how they are started, and how messages and arrays pass."""
