"""In which order gangs run: one line an island, policies, and dispatch units. Pure."""
