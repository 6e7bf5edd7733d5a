"""The seam for devices, and the kinds that there are."""
