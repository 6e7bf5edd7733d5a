"""Services of a host for a session besides running programs: calls into the client's Python, Python, profiles."""
