"""The host agent: it runs on a machine of a cluster, dials the controller, and holds one worker."""
