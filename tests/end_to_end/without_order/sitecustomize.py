"""Disable the order of gangs in the controller that is started with this directory in PYTHONPATH.

Every second host's messages of a flush are held until the next flush, and follow the messages that other sessions send
to it then, session by session, in reverse order. Each host still receives each session's messages in order; only the
common order of all sessions is missing. The controller flushes at least once per second, so that no message is held for
long.
"""

import sys

if any("atoll.controller_process.controller_main" in argument for argument in getattr(sys, "orig_argv", [])):
    from atoll.launch.outbox import Outbox
    from atoll.protocol.actions import Send

    take = Outbox.take
    held: list[Send] = []

    def take_without_order(self):  # type: ignore[no-untyped-def]
        odd_hosts = {connection for host, connection in self._connections.hosts.items() if host % 2}
        others, odd = [], []
        for each in take(self):
            of_a_session = isinstance(each, Send) and hasattr(each.message, "session")
            (odd if of_a_session and each.connection in odd_hosts else others).append(each)
        if not held:
            held.extend(odd)
            return others
        sessions = {each.message.session for each in held}
        overtakes = [each for each in odd if each.message.session not in sessions]
        behind = [each for each in odd if each.message.session in sessions]
        late = sorted(held, key=lambda each: -each.message.session)
        held.clear()
        return others + overtakes + late + behind

    Outbox.take = take_without_order  # type: ignore[method-assign]
