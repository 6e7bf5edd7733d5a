"""The client's proxy: speaks the IFRT proxy protocol with jaxlib's own C++ client, and Atoll's with the cluster."""
