"""What a host does for a session beside running its programs: calls into the client's Python, Python, profiles."""
