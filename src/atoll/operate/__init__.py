"""What the command `atoll` does: it starts, finds, shows, changes and ends clusters.

The command line itself is `atoll.operate.command`; what starts the hosts of a cluster is in `atoll.engines`.
"""
