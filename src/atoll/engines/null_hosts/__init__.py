"""Hosts of null devices. One process or one simulation holds many of them, with no threads or sockets per worker."""
