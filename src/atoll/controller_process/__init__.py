"""The controller as a process: sockets, a clock and random numbers around the decisions of `controller.core`."""
