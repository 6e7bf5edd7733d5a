"""What the command `atoll` does: starts, finds, asks and ends clusters. The command line itself is `atoll.cli`."""
