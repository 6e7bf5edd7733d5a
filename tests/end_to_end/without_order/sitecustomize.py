"""Switches the order of gangs off, in the controller that is started with this folder in PYTHONPATH.

What the controller sends at a time reaches every second host session by session, the last one first. Each host still
gets each session's messages in order: what is missing is the one order of all sessions.
"""

import sys

if any("atoll.controller.main" in argument for argument in getattr(sys, "orig_argv", [])):
    from atoll.controller.outbox import Outbox
    from atoll.protocol.actions import Send

    take = Outbox.take

    def take_without_order(self):  # type: ignore[no-untyped-def]
        actions = take(self)
        odd_hosts = {connection for host, connection in self._connections.hosts.items() if host % 2}
        odd = [each for each in actions if isinstance(each, Send) and each.connection in odd_hosts]
        others = [each for each in actions if not (isinstance(each, Send) and each.connection in odd_hosts)]
        return others + sorted(odd, key=lambda each: -getattr(each.message, "session", 1 << 60))

    Outbox.take = take_without_order  # type: ignore[method-assign]
