"""What a session launches before it can be in line: it waits for somebody else, or for data to decide what it is."""
