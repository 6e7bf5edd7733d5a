"""The inbox: what arrives, fails, and is awaited."""

from __future__ import annotations

from atoll.errors import Code, Status
from atoll.protocol.messages import OWN_NUMBERS
from atoll.transfers.inbox import Inbox


def test_what_comes_for_a_session_that_is_over_is_not_kept():
    inbox, told = Inbox(lambda session, feed: None), []
    inbox.put(5, OWN_NUMBERS, b"before", lambda: told.append("before"))
    inbox.drop_session(5)
    inbox.put(5, OWN_NUMBERS + 1, b"after", lambda: told.append("after"))
    inbox.fail(5, [OWN_NUMBERS + 2], Status(Code.CANCELLED, "over"))
    assert told == ["before", "after"]
    assert (inbox.nbytes, inbox._feeds, inbox._failed) == (0, {}, {})
