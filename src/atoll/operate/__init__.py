"""What the command `atoll` does: starts, finds, asks and ends clusters. `atoll.cli` is its command line."""
