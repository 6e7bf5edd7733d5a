"""TLS between Atoll's processes: who they are to each other (`identity`), and byte streams (`stream`)."""
