"""Downloads arrive completely or fail, exactly once, and their memory is released once."""

from __future__ import annotations

import asyncio

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.session.downloads import TRANSITIONS, Download, Downloads, DownloadState
from tests.state_tables import check_table

FAILURE = Status(int(Code.DATA_LOSS), "it burnt")
FEED = 4


class Expecting:
    """A download from hosts 0 and 1."""

    def __init__(self) -> None:
        self.downloads = Downloads()
        self.loop = asyncio.new_event_loop()
        self.started: list[DownloadState] = []
        self.released: list[bytes] = []
        self.download = Download(
            FEED, (0, 2), 16, self.loop.create_future, lambda each: self.started.append(each.state)
        )
        self.downloads.expect(self.download)

    def start(self, download: Download) -> None:
        self.started.append(download.state)

    def sent(self) -> None:
        self.downloads.sent(self.download, [0, 1])

    def comes(self, content: bytes, more: bool = False) -> None:
        self.downloads.take(FEED, content, more, lambda: self.released.append(content))

    def part(self, index: int) -> asyncio.Task[bytes | None]:
        task = self.loop.create_task(self.download.part(index))
        self.loop.run_until_complete(asyncio.sleep(0))
        return task

    def result(self, task: asyncio.Task[bytes | None]) -> bytes | None:
        return self.loop.run_until_complete(task)


def test_the_table_has_all_transitions() -> None:
    def download_in(state: DownloadState) -> Download:
        download = Download(FEED, (0,), 1, asyncio.Future)
        download.state = state
        return download

    check_table(download_in, DownloadState, TRANSITIONS)


@pytest.fixture
def feed():
    made = Expecting()
    yield made
    made.loop.close()


def test_parts_can_be_read_while_others_arrive_and_nothing_comes_after_the_last(feed: Expecting):
    second = feed.part(1)
    assert feed.download.state is DownloadState.EXPECTED
    feed.comes(b"a", more=True)
    assert feed.download.state is DownloadState.ARRIVING
    assert feed.downloads.any()
    feed.comes(b"b")
    assert feed.download.state is DownloadState.STORED
    assert not feed.downloads.any()
    assert [feed.result(each) for each in (feed.part(0), second, feed.part(2))] == [b"a", b"b", None]
    assert feed.started == [DownloadState.ARRIVING]
    feed.comes(b"for nobody")
    assert feed.released == [b"for nobody"]


def test_a_part_can_be_fetched_until_its_memory_is_released(feed: Expecting):
    feed.comes(b"a", more=True)
    feed.comes(b"b")
    feed.download.release(1)
    assert feed.released == [b"a"]
    with pytest.raises(StatusError, match="only once"):
        feed.result(feed.part(0))
    feed.download.drop()
    assert feed.released == [b"a", b"b"]


@pytest.mark.parametrize("parts", [0, 1], ids=["before the first part", "after it"])
def test_the_memory_of_parts_that_arrive_after_the_client_has_dropped_them_is_released(feed: Expecting, parts: int):
    contents = [b"a", b"b", b"c"]
    for content in contents[:parts]:
        feed.comes(content, more=True)
    feed.download.drop()
    assert feed.download.state is DownloadState.SERVED
    for content in contents[parts:]:
        feed.comes(content, more=content != b"c")
    assert feed.released == contents
    assert not feed.downloads.any()
    assert len(feed.started) == parts


def test_a_launch_that_fails_fails_its_download_once(feed: Expecting):
    first = feed.part(0)
    feed.downloads.fail(feed.download, FAILURE)
    feed.downloads.fail(feed.download, Status(int(Code.INTERNAL), "again"))
    assert feed.started == [DownloadState.FAILED]
    with pytest.raises(StatusError, match="it burnt"):
        feed.result(first)
    feed.comes(b"too late")
    assert (feed.released, feed.downloads.any()) == ([b"too late"], False)


def test_with_a_host_that_has_sent_all_what_is_on_its_way_is_lost(feed: Expecting):
    feed.sent()
    feed.comes(b"a", more=True)
    feed.downloads.hosts_failed([2])
    assert feed.download.state is DownloadState.ARRIVING
    feed.downloads.hosts_failed([1, 2])
    assert feed.download.state is DownloadState.FAILED
    assert feed.download.status.code is Code.DATA_LOSS
    assert "host 1 is gone" in feed.download.status.message
    assert not feed.downloads.any()


def test_what_has_come_whole_outlives_its_host_and_its_session(feed: Expecting):
    feed.sent()
    feed.comes(b"a")
    feed.downloads.hosts_failed([0, 1])
    feed.downloads.fail_all(FAILURE)
    assert feed.download.state is DownloadState.STORED


def test_what_a_host_has_not_sent_yet_may_come_when_it_is_back(feed: Expecting):
    feed.downloads.hosts_failed([0])
    feed.sent()
    feed.comes(b"a")
    assert feed.download.state is DownloadState.STORED


def test_with_its_session_a_download_fails_though_its_hosts_have_sent_it(feed: Expecting):
    feed.sent()
    feed.downloads.fail_all(FAILURE)
    assert (feed.download.state, feed.download.status) == (DownloadState.FAILED, FAILURE)
