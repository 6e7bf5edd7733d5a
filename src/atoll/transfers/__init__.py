"""The data plane, which carries bulk bytes between processes without going through the controller."""
