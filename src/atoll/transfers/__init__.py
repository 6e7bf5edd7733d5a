"""The data plane: bulk bytes between processes, past the controller."""
