"""The controller process: sockets, clock and randomness around the decisions of `controller.core`."""
