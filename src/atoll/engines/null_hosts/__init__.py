"""Hosts of null devices: workers without threads or sockets of their own, many in one process or in virtual time."""
