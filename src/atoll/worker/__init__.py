"""A host's worker: compiles, keeps the shards of logical buffers, runs plans, and moves bulk bytes."""
