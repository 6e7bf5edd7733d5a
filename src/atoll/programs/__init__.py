"""Traced programs: each turns a function over several compiled functions into one launch."""
