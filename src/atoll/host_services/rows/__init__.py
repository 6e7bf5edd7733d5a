"""The rows of sparse exchanges, as hosts send them to one another."""
