"""Front ends: what turns a client's requests into programs and launches."""
