"""A cluster of null devices in virtual time: the real controller, hosts and client in one process, and no sockets.

What is real: `Controller`, which gets the same events as in its own process; `NullHost` with its plans, stores and
inboxes; `BareClient`; and every message between them. What is modelled: time. A message takes a latency, and its
receiver is busy for a while (`costs.Costs`); an event heap jumps from one event to the next. Nothing depends on the
machine that this runs on: the same run gives the same times, to the last bit.

It is for what takes minutes on more devices than one has: a training step of a large model on hundreds of hosts.
"""
