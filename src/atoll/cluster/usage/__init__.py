"""Who used how much of a cluster: the records, and where they are kept."""
