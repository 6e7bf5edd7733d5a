"""A host's worker: compiles, keeps the shards of logical buffers, walks plans, and moves bulk bytes."""
