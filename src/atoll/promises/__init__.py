"""What a session launches before it can be in line: what it waits for takes as long as somebody else likes."""
