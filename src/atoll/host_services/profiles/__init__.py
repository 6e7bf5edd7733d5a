"""Profiles of a host: recorded for one session at a time, without other sessions' programs, and handed over."""
