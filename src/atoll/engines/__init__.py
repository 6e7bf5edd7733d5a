"""Start, watch and end the processes of a cluster. `engine_interface` is the interface of engines."""
