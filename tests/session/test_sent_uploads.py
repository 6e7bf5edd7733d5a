"""Sent uploads are kept within a bound."""

from __future__ import annotations

from atoll.session.sent_uploads import SentUploads, Upload
from atoll.transfers.piece_contents import BufferContents


def upload(nbytes: int) -> Upload:
    return Upload(BufferContents([memoryview(bytes(nbytes))], 1), None)


def test_the_latest_uploads_are_kept_as_far_as_they_fit():
    sent = SentUploads(max_bytes=10, limit=3)
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
    sent = SentUploads(max_bytes=10)
    sent.add(0, 1, upload(4))
    sent.add(0, 2, upload(11))
    assert list(sent.of_host(0)) == [1, 2]
    sent.landed(0, 2)
    assert list(sent.of_host(0)) == [1]
