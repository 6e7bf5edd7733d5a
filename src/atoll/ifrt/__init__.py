"""The client's proxy. It speaks the IFRT proxy protocol with jaxlib's client, and Atoll's protocol with the cluster."""
