"""A host's connections for bulk data: its listening data port, its channels to other hosts, and their silence."""
