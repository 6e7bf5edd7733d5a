"""Compiler processes: a host compiles tenants' programs there, so a crash costs nobody else anything."""
