"""Downloads arrive, are forgotten or are lost, exactly once. Sent uploads are kept within a bound."""

from __future__ import annotations

from typing import Any

from atoll.errors import Code, Status
from atoll.session.session_feeds import Downloads, SentUploads, Upload
from atoll.transfers.piece_contents import BufferContents


class Expecting:
    """Feed 4 of hosts 0 and 1 is expected."""

    def __init__(self) -> None:
        self.downloads = Downloads()
        self.parts: list[tuple[Any, bool]] = []
        self.lost: list[Status] = []
        self.downloads.expect(4, lambda content, more, done: self.parts.append((content, more)))

    def sent(self) -> None:
        self.downloads.sent(4, [0, 1], self.lost.append)

    def comes(self, content: bytes, more: bool = False) -> None:
        self.downloads.take(4, content, more, lambda: None)


def test_contents_come_until_the_last_and_what_nobody_expects_may_be_used_again():
    feed, read = Expecting(), list[str]()
    feed.comes(b"a", more=True)
    assert feed.downloads.expects(4)
    feed.comes(b"b")
    assert feed.parts == [(b"a", True), (b"b", False)]
    assert not feed.downloads.expects(4)
    feed.downloads.take(4, b"for nobody", False, lambda: read.append("nobody"))
    assert read == ["nobody"]


def test_what_is_forgotten_is_expected_no_more():
    feed = Expecting()
    feed.sent()
    feed.downloads.forget(4)
    feed.downloads.hosts_failed([0])
    feed.comes(b"a")
    assert (feed.downloads.any(), feed.parts, feed.lost) == (False, [], [])


def test_with_a_host_that_has_sent_all_what_is_on_its_way_is_lost_once():
    feed = Expecting()
    feed.sent()
    feed.comes(b"a", more=True)
    feed.downloads.hosts_failed([2])
    assert feed.downloads.expects(4)
    feed.downloads.hosts_failed([1, 2])
    feed.downloads.hosts_failed([1, 2])
    (status,) = feed.lost
    assert status.code is Code.DATA_LOSS
    assert "host 1 is gone" in status.message
    assert not feed.downloads.any()


def test_what_has_come_whole_outlives_its_host():
    feed = Expecting()
    feed.sent()
    feed.comes(b"a")
    feed.downloads.hosts_failed([0, 1])
    assert feed.lost == []


def test_what_a_host_has_not_sent_yet_may_come_when_it_is_back():
    feed = Expecting()
    feed.downloads.hosts_failed([0])
    feed.sent()
    feed.comes(b"a")
    assert (feed.parts, feed.lost) == ([(b"a", False)], [])


def upload(nbytes: int) -> Upload:
    return Upload(BufferContents([memoryview(bytes(nbytes))], 1), None)


def test_the_latest_uploads_are_kept_as_far_as_they_fit():
    sent = SentUploads(most_bytes=10, most=3)
    for feed, nbytes in enumerate((4, 4, 4)):
        sent.add(0, feed, upload(nbytes))
    assert list(sent.of_host(0)) == [1, 2]
    sent.add(1, 3, upload(1))
    sent.add(0, 4, upload(1))
    assert (list(sent.of_host(0)), list(sent.of_host(1))) == ([2, 4], [3])
    assert sent.statistics() == (3, 6)
    sent.clear()
    assert sent.statistics() == (0, 0)


def test_a_larger_upload_is_kept_until_it_has_landed():
    sent = SentUploads(most_bytes=10)
    sent.add(0, 1, upload(4))
    sent.add(0, 2, upload(11))
    assert list(sent.of_host(0)) == [1, 2]
    sent.landed(0, 2)
    assert list(sent.of_host(0)) == [1]
