"""The user's side of colocated Python: the process that runs his functions. No other process imports it."""
