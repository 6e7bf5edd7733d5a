"""Migrate sessions while their programs run, suspend them, and spill idle arrays."""
