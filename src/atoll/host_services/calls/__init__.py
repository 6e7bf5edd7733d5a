"""A host's calls into its clients' Python: callbacks of programs, and questions of a compilation."""
