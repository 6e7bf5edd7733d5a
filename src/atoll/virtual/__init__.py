"""A cluster of null devices in virtual time: the real controller, hosts and client in one process, and no sockets.

The simulation runs the real `Controller` with its scheduler and outbox, the real `NullHost` with its executor, plans,
stores and inboxes, the real `BareClient`, and every message between them. Only time is modeled: `Costs` gives the
latency of a message and the time that a process needs to handle it. Results do not depend on the machine: repeated
runs give bitwise identical times.

Use it for experiments on devices that are not available, such as a training step of a large model on hundreds of
hosts. `atoll.testing` is the public interface.
"""
