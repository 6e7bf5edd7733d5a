"""Profiles of a host: recorded for one session at a time, cleared of others' programs, handed over."""
