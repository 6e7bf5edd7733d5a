"""The engine for machines with host agents, which users or launchers start."""
