"""A host's worker, which compiles functions, holds the shards of logical buffers, runs plans, and moves bulk bytes."""
