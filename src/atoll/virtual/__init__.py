"""A cluster of null devices in virtual time: the real controller, hosts and client in one process, and no sockets.

What is real: `Controller` with its scheduler and outbox, `NullHost` with its executor, plans, stores and inboxes,
`BareClient`, and every message between them. What is modelled: time. A message takes a latency, and the process that
handles it is busy for a while (`costs.Costs`); an event heap jumps from one event to the next. Nothing depends on the
machine that this runs on: the same run gives the same times, to the last bit.

It is for experiments on devices that are not at hand, such as a training step of a large model on hundreds of hosts.
`atoll.testing` is its public face.
"""
