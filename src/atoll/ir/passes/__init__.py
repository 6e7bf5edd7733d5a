"""The passes that lower a program, in order: simplify, place, explicit transfers; and the cut into plans."""
