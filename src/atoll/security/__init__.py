"""Authenticate the processes of a cluster: certificate authority, join tokens, enrollment, roles, tokens."""
