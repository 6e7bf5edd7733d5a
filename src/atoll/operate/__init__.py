"""The operations of the command `atoll`: start, find, show, change and end clusters.

The command line is in `atoll.operate.command`; `atoll.engines` starts the hosts of a cluster.
"""
