"""The host agent, which runs on a machine of a cluster, connects to the controller, and holds one worker."""
