"""The engine for Ray clusters, in which Ray places islands and starts the host agents."""
