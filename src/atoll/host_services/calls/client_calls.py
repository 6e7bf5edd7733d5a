"""Calls from a host into its clients' Python, and the errors that they raise.

Invariant: each call ends with its answer or with its session's channel, whatever the client sends.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from atoll import errors
from atoll.errors import AtollError, Code, FrameError, Status, StatusError, shortened
from atoll.host_services.calls.call_messages import (
    ArrayType,
    Call,
    DirectWanted,
    ReadWanted,
    Released,
    Retained,
    Returned,
    Unread,
    decode,
    decode_answer,
    encode,
    first_call,
    is_call,
    is_notice,
)
from atoll.host_services.calls.call_threads import SessionThreads
from atoll.host_services.calls.direct_channels import DirectChannels, Receive, receive_answers
from atoll.protocol.number_ranges import SCRIPT_FEEDS, is_client_handle
from atoll.transfers.channel import DataChannel

# Marks around the text of an error that a worker raises into XLA, and at the beginning of the text of a StatusError.
_BEGIN, _END, _STATUS = "\x02", "\x03", "\x04"
_WRAPPED = re.compile(f"Traceback \\(most recent call last\\):\n[^{_BEGIN}]*{_BEGIN}(.*?){_END}", re.DOTALL)
# Of an answer beside its results: their types, gaps between them, or the text of an error.
_OTHER_BYTES = 1 << 20
_NOTICE_BYTES = 4096  # limit for a client's notice
_NO_MARKS = str.maketrans("", "", _BEGIN + _END + _STATUS)  # removes marks from a client's text


class Reply(msgspec.Struct, frozen=True):
    """The results of a callable: a piece, the types and offsets of its arrays, and a function to release the piece."""

    types: tuple[ArrayType, ...]
    offsets: list[int]
    content: Any
    done: Callable[[], None]


class _Waiting(NamedTuple):
    """A call: the queue for its answer, its channel, and the largest number of bytes of its results."""

    slot: queue.SimpleQueue[Any]
    channel: DataChannel
    limit: int


# A session and its notice; None ends the queue.
_Notice = tuple[int, Retained | Released] | None
_Notified = tuple[int, tuple[int, ...]]  # a session and its callables


class ClientError(Exception):
    """A callable has raised an exception. The text is the traceback from the client's process."""


class Calls:
    """The calls of one host into clients' Python, and the notices of clients on the same channels. Thread-safe.

    `channel_of(session)` returns the channel to the session's proxy, or raises StatusError. The data port passes the
    answers and notices to `answered` (see `peers.data_port.Answers`). A notice requests a small array, or a channel
    that bypasses the proxy. `receive` is as in `DirectChannels`.

    `read(session, wanted, otherwise)` sends the contents of an array of the session to its client, and returns
    whether that is possible. If the array is not ready, they are sent later, or `otherwise` is called on any thread.
    """

    def __init__(
        self,
        channel_of: Callable[[int], DataChannel],
        host: int,
        read: Callable[[int, ReadWanted, Callable[[], None]], bool],
        receive: Receive = receive_answers,
    ) -> None:
        self._channel_of = channel_of
        self._host = host
        self._read_array = read
        self._direct = DirectChannels(self.answered, self._fail, receive)
        self._waiting: dict[int, dict[int, _Waiting]] = {}  # by session and feed
        self._lock = threading.Lock()
        self._notices: queue.SimpleQueue[_Notice] | None = None
        self._notifying = SessionThreads("atoll-call-notices", limit=1)  # keeps the order of notices
        # A random start, because the client may still answer calls from an earlier process of this host.
        self._serial = itertools.count(1 + secrets.randbits(39))

    def call(
        self, session: int, callback: int, types: tuple[ArrayType, ...], arrays: Sequence[Any], limit: int = 0
    ) -> Reply:
        """Call the client's callable, and wait for the answer as long as the session has a channel.

        `limit` is the largest number of bytes that the results may have, without their types. A client whose answer is
        larger does not make this host allocate memory for it.

        Raises ClientError if the callable raises. Raises StatusError, with the code CANCELLED if there is no answer.
        """
        feed = first_call(self._host) + next(self._serial)
        slot: queue.SimpleQueue[Any] = queue.SimpleQueue()
        channel = self._direct.of(session, self._channel_of(session))
        with self._lock:
            self._waiting.setdefault(session, {})[feed] = _Waiting(slot, channel, limit)
        try:
            _send(channel, session, feed, encode(Call(callback, types), arrays))
            outcome = slot.get()
        finally:
            self._forget(session, feed)
        if isinstance(outcome, Reply):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # its traceback refers to this frame, and so to the caller's arrays

    def channel(self, session: int, proxy: DataChannel) -> DataChannel:
        """Return the channel for contents that a session's client receives: directly to its process, or `proxy`."""
        return self._direct.of(session, proxy)

    def channel_nowait(self, session: int, proxy: DataChannel) -> DataChannel | None:
        """Return what `channel` returns, or None if that might wait for the client. Never waits."""
        return self._direct.of_nowait(session, proxy)

    def unread(self, session: int, feed: int) -> None:
        """Notify the session that contents will not arrive on the client's own channel, which has ended."""
        _send(self._channel_of(session), session, first_call(self._host), encode(Unread((feed,))))

    def _forget(self, session: int, feed: int) -> queue.SimpleQueue[Any] | None:
        with self._lock:
            waiting = self._waiting.get(session, {})
            found = waiting.pop(feed, None)
            if not waiting:
                self._waiting.pop(session, None)
            return None if found is None else found.slot

    def retain(self, session: int, callbacks: tuple[int, ...]) -> None:
        """Notify the session that this host may call these callables, until each call of `retain` has its `release`."""
        with self._lock:
            if self._notices is None:
                self._notices = queue.SimpleQueue()
                pass_on = partial(self._pass_notices_on, self._notices)
                threading.Thread(target=pass_on, name="atoll-call-notices", daemon=True).start()
        self._notices.put((session, Retained(callbacks)))

    def release(self, session: int, callbacks: tuple[int, ...]) -> None:
        """Notify the session that this host will not call these callables again, unless they are retained once more.

        Never blocks, because it may run during a garbage collection, while the thread holds any lock.
        """
        if self._notices is not None:
            self._notices.put((session, Released(callbacks)))

    def _pass_notices_on(self, notices: queue.SimpleQueue[_Notice]) -> None:
        """Send notices on one thread per session, so that a client that does not read blocks no other session."""
        counts: Counter[_Notified] = Counter()  # here, since `release` may not wait for a lock
        while (each := notices.get()) is not None:
            session, notice = each
            is_retained, notified = isinstance(notice, Retained), (session, notice.callbacks)
            counts[notified] += 1 if is_retained else -1
            if counts[notified] == is_retained:  # the first one, or the last one is released
                self._notifying.submit(session, partial(self._notify, session, notice))
            if not counts[notified]:
                del counts[notified]

    def _notify(self, session: int, notice: Retained | Released) -> None:
        with contextlib.suppress(AtollError):  # the session has ended
            _send(self._channel_of(session), session, first_call(self._host), encode(notice))

    def close(self) -> None:
        """Stop sending notices."""
        if self._notices is not None:
            self._notices.put(None)

    # ---- answers

    def takes(self, feed: int) -> bool:
        return is_call(feed)

    def awaits(self, session: int, feed: int, nbytes: int) -> bool:
        with self._lock:
            call = self._waiting.get(session, {}).get(feed)
        if call is None or nbytes <= call.limit + _OTHER_BYTES:
            return call is not None
        self._forget(session, feed)
        text = f"the answer of a callback is invalid: it has {nbytes} bytes, and the results have at most {call.limit}"
        call.slot.put(StatusError(Code.INVALID_ARGUMENT, text))
        return False

    def answered(self, session: int, feed: int, content: Any, done: Callable[[], None]) -> None:
        """Handle a piece that has arrived: the answer to a call, or a notice.

        All other pieces are dropped, because clients are not trusted.
        """
        slot = self._forget(session, feed)
        if slot is None:
            try:
                if is_notice(feed):
                    self._take_notice(session, content)
            finally:
                done()
            return
        try:
            message, offsets = decode_answer(content)
        except FrameError as error:
            done()
            slot.put(StatusError(Code.INVALID_ARGUMENT, f"the answer of a callback is invalid: {error}"))
            return
        if isinstance(message, Returned):
            slot.put(Reply(message.arrays, offsets, content, done))
            return
        done()
        text = shortened(message.text.translate(_NO_MARKS))
        slot.put(_cancelled(session, text) if message.cancelled else ClientError(text))

    def _take_notice(self, session: int, content: Any) -> None:
        if memoryview(content).nbytes > _NOTICE_BYTES:
            return
        try:
            notice, _ = decode(content)
        except FrameError:  # clients are not trusted
            return
        if isinstance(notice, ReadWanted):
            self._read(session, notice)
        elif isinstance(notice, DirectWanted):
            self._direct.of(session, self._channel_of(session))

    def _read(self, session: int, wanted: ReadWanted) -> None:
        """Send the contents of an array to the session's client, or report that they are not sent."""
        if wanted.feed not in SCRIPT_FEEDS or not is_client_handle(wanted.handle):
            return

        def otherwise() -> None:
            with contextlib.suppress(AtollError):  # the session has ended
                self.unread(session, wanted.feed)

        try:
            is_sent = self._read_array(session, wanted, otherwise)
        # RuntimeError: of a device, which a launch of the read has as well. ValueError: a channel is being closed.
        except (AtollError, OSError, RuntimeError, ValueError):
            is_sent = False
        if not is_sent:
            otherwise()

    def fail(self, session: int) -> None:
        """Cancel the calls of a session whose channel has ended."""
        self._direct.close(session)
        self._fail(session)

    def _fail(self, session: int, channel: DataChannel | None = None) -> None:
        """Cancel the calls on one channel of a session, or on all its channels."""
        with self._lock:
            calls = self._waiting.get(session, {}).values()
            waiting = [each.slot for each in calls if channel in (None, each.channel)]
        for slot in waiting:
            slot.put(_cancelled(session))


def _send(channel: DataChannel, session: int, feed: int, contents: list[Any]) -> None:
    try:
        channel.send(session, feed, contents)
    except OSError as error:
        raise _cancelled(session) from error
    if channel.is_closed:  # `fail` may have run before this call was registered
        raise _cancelled(session)


def _cancelled(session: int, why: str = "its client has exited, or the connection to it was lost") -> StatusError:
    return StatusError(Code.CANCELLED, f"a callback of session {session} has no answer: {why}")


def wrapped(error: ClientError | StatusError) -> Exception:
    """Return the exception to raise into XLA.

    XLA converts an exception to text, and adds the traceback of this process. The marks allow
    `status_of_device_error` to extract the client's text.
    """
    sign = _STATUS if isinstance(error, StatusError) else ""
    return ClientError(f"{_BEGIN}{sign}{error}{_END}")


def kept(error: ClientError | StatusError) -> Status:
    """Return the status, as XLA would word it, of a run whose callback failed without XLA's knowledge."""
    if isinstance(error, StatusError):
        return error.status
    return Status(Code.INTERNAL, f"CpuCallback error calling callback: {error}")


def status_of_device_error(error: BaseException) -> Status:
    """Return the status for an exception from a device. For a callback, it contains only the client's traceback."""
    text = str(error)
    found = _WRAPPED.search(text)
    if found is None:
        return errors.status_of(error)
    inner = found[1]
    if inner.startswith(_STATUS):
        return errors.status_of(RuntimeError(inner.removeprefix(_STATUS)))
    return errors.status_of(RuntimeError(_WRAPPED.sub(lambda match: match[1], text)))
