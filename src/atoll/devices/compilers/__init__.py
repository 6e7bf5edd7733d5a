"""Compiler processes, in which a host compiles tenants' programs: a crash ends only that process."""
