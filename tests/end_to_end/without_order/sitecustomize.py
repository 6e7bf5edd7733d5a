"""Switches the order of gangs off, in the controller that is started with this folder in PYTHONPATH.

What the controller sends at a time reaches every second host session by session, the last one first. Each host still
gets each session's messages in order: what is missing is the one order of all sessions.
"""

import sys

if any("atoll.controller.main" in argument for argument in getattr(sys, "orig_argv", [])):
    from atoll.controller.outbox import Outbox

    take = Outbox.take

    def take_without_order(self):  # type: ignore[no-untyped-def]
        messages = take(self)
        odd = [each for each in messages if each[0][0] == "host" and each[0][1] % 2]
        even = [each for each in messages if not (each[0][0] == "host" and each[0][1] % 2)]
        return even + sorted(odd, key=lambda each: -getattr(each[1], "session", 1 << 60))

    Outbox.take = take_without_order  # type: ignore[method-assign]
