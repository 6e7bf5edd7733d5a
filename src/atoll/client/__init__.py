"""In the user's process: the backend plug-in for JAX, and what starts or finds a cluster for it."""
