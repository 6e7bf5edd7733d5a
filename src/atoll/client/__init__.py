"""The client in the user's process: the backend plug-in for JAX, which starts or finds a cluster."""
