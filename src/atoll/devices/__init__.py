"""The interface between a worker and its devices, and the kinds of devices that implement it."""
