"""The inbox: what arrives, fails, and is awaited."""

from __future__ import annotations

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.protocol.messages import INTERNAL_FEEDS
from atoll.transfers import inbox as module
from atoll.transfers.inbox import Inbox


def test_what_comes_for_a_session_that_is_over_is_not_kept():
    inbox, released = Inbox(lambda session, feed: None), []
    inbox.put(5, INTERNAL_FEEDS, b"before", lambda: released.append("before"))
    inbox.drop_session(5)
    inbox.put(5, INTERNAL_FEEDS + 1, b"after", lambda: released.append("after"))
    inbox.fail(5, INTERNAL_FEEDS + 2, 1, Status(Code.CANCELLED, "over"))
    assert released == ["before", "after"]
    assert (inbox.nbytes, inbox._feeds, dict(inbox._failed)) == (0, {}, {})


def test_failed_feeds_are_remembered_up_to_a_bound_and_the_latest_of_them(monkeypatch):
    monkeypatch.setattr(module, "MAX_FAILED_FEEDS", 3)
    inbox = Inbox(lambda session, feed: None)
    feeds = [INTERNAL_FEEDS + i for i in range(10)]
    for feed in feeds:
        inbox.fail(5, feed, 1, Status(Code.CANCELLED, "its launch has failed"))
    assert [feed for feed in feeds if feed in inbox._failed[5]] == feeds[-3:]
    for feed in feeds[-3:]:
        with pytest.raises(StatusError, match="its launch has failed"):
            inbox.take(5, feed)


def test_feeds_that_are_taken_together_are_all_there_or_none_of_them_stays():
    inbox, released = Inbox(lambda session, feed: None), []
    for feed in (1, 2, 4):
        inbox.put(5, feed, b"bytes", lambda feed=feed: released.append(feed))
    assert list(inbox.take_all(5, [1, 2, 1])) == [1, 2]
    assert released == []
    inbox.put(5, 2, b"bytes", lambda: released.append("again"))
    inbox.put_failed(5, 3, Status(Code.DATA_LOSS, "it was cut off"))
    with pytest.raises(StatusError, match="it was cut off"):
        inbox.take_all(5, [2, 3, 4])
    assert (released, inbox.nbytes) == (["again", 4], 0)
