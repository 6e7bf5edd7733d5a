"""What the command `atoll` does: starts, finds, asks and ends clusters. `atoll.operate.command` is its command line."""
