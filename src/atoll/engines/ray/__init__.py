"""The engine for machines of a Ray cluster: Ray places islands, and starts a host agent on each machine of theirs."""
