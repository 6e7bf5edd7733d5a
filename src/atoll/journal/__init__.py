"""Records of all events that a controller has handled: a log for operators, and files from which it restarts."""
