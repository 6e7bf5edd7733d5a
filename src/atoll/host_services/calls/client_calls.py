"""A host's calls into its clients' Python that wait for an answer: the one place where answers are awaited.

Invariant: each call ends, by its answer or with its session's channel, whatever the client sends.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.errors import AtollError, Code, FrameError, StatusError, shortened
from atoll.host_services.calls.call_messages import (
    ArrayType,
    Call,
    Raised,
    Released,
    Retained,
    Returned,
    decode,
    encode,
    first_call,
    is_call,
)
from atoll.host_services.calls.call_threads import SessionThreads
from atoll.host_services.calls.direct_channels import DirectChannels
from atoll.transfers.channel import DataChannel

# No traceback has these: workers mark what they pass through XLA with them.
_NO_MARKS = str.maketrans("", "", "\x02\x03\x04")


@dataclass(frozen=True)
class Reply:
    """What a callable has returned: a piece with arrays, where they are in it, and what to call when they are read."""

    types: tuple[ArrayType, ...]
    offsets: list[int]
    content: Any
    done: Callable[[], None]


# For a session; None: no more will follow.
_Notice = tuple[int, Retained | Released] | None


class ClientError(Exception):
    """A callable has raised; the text is the traceback of the client's process."""


class Calls:
    """For any thread. Those of host `host`, to which the proxies send the answers.

    `channel_of(session)` is the channel to the session's proxy; raises StatusError without one. Answers come by the
    data port: see `transfers.data_port.Answers`.
    """

    def __init__(self, channel_of: Callable[[int], DataChannel], host: int) -> None:
        self._channel_of = channel_of
        self._host = host
        self._direct = DirectChannels(self.answered, self._fail)
        # By session and feed: where the answer goes, and the channel of the call.
        self._waiting: dict[int, dict[int, tuple[queue.SimpleQueue[Any], DataChannel]]] = {}
        self._lock = threading.Lock()
        self._notices: queue.SimpleQueue[_Notice] | None = None
        self._notifying = SessionThreads("atoll-call-notices", most=1)  # in the order in which they come
        # Not those of an earlier process of this host, whose calls the client may still answer.
        self._serial = itertools.count(1 + secrets.randbits(39))

    def call(self, session: int, callback: int, types: tuple[ArrayType, ...], arrays: Sequence[Any]) -> Reply:
        """Calls the client's callable, and waits for the answer, for as long as the session has a channel.

        Raises ClientError where the callable has raised, and StatusError: CANCELLED where nobody will answer.
        """
        feed = first_call(self._host) + next(self._serial)
        slot: queue.SimpleQueue[Any] = queue.SimpleQueue()
        channel = self._direct.of(session, self._channel_of(session))
        with self._lock:
            self._waiting.setdefault(session, {})[feed] = slot, channel
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
            del outcome  # with its traceback it refers to this frame, and so to the arrays of whoever calls

    def _forget(self, session: int, feed: int) -> queue.SimpleQueue[Any] | None:
        with self._lock:
            waiting = self._waiting.get(session, {})
            slot, _ = waiting.pop(feed, (None, None))
            if not waiting:
                self._waiting.pop(session, None)
            return slot

    def retain(self, session: int, callbacks: tuple[int, ...]) -> None:
        """Tells the session that this host may call these callables."""
        with self._lock:
            if self._notices is None:
                self._notices = queue.SimpleQueue()
                pass_on = partial(self._pass_notices_on, self._notices)
                threading.Thread(target=pass_on, name="atoll-call-notices", daemon=True).start()
        self._notices.put((session, Retained(callbacks)))

    def release(self, session: int, callbacks: tuple[int, ...]) -> None:
        """Tells the session that this host calls them no more. Blocks on nothing: it may run while garbage is
        collected, whatever lock that thread holds.
        """
        if self._notices is not None:
            self._notices.put((session, Released(callbacks)))

    def _pass_notices_on(self, notices: queue.SimpleQueue[_Notice]) -> None:
        """A client that reads nothing stops the notices of no other session."""
        while (each := notices.get()) is not None:
            session, notice = each
            self._notifying.submit(session, partial(self._notify, session, notice))

    def _notify(self, session: int, notice: Retained | Released) -> None:
        with contextlib.suppress(AtollError):  # its session has ended
            _send(self._channel_of(session), session, first_call(self._host), encode(notice))

    def close(self) -> None:
        """Sends no more notices."""
        if self._notices is not None:
            self._notices.put(None)

    # ---- what arrives

    def takes(self, feed: int) -> bool:
        return is_call(feed)

    def answered(self, session: int, feed: int, content: Any, done: Callable[[], None]) -> None:
        """A piece of a call has arrived. What answers no call is dropped: a client may send anything."""
        slot = self._forget(session, feed)
        if slot is None:
            done()
            return
        try:
            message, offsets = decode(content)
        except FrameError as error:
            done()
            slot.put(StatusError(Code.INVALID_ARGUMENT, f"the answer of a callback cannot be read: {error}"))
            return
        if isinstance(message, Returned):
            slot.put(Reply(message.arrays, offsets, content, done))
            return
        done()
        if isinstance(message, Raised):
            text = shortened(message.text.translate(_NO_MARKS))
            slot.put(_cancelled(session, text) if message.cancelled else ClientError(text))
        else:
            slot.put(StatusError(Code.INVALID_ARGUMENT, "a callback was answered by a call"))

    def fail(self, session: int) -> None:
        """The session's channel has ended: its calls get no answer."""
        self._direct.close(session)
        self._fail(session)

    def _fail(self, session: int, channel: DataChannel | None = None) -> None:
        """No answer will come on this channel, or on any."""
        with self._lock:
            waiting = [slot for slot, its in self._waiting.get(session, {}).values() if channel in (None, its)]
        for slot in waiting:
            slot.put(_cancelled(session))


def _send(channel: DataChannel, session: int, feed: int, contents: list[Any]) -> None:
    try:
        channel.send(session, feed, contents)
    except (OSError, ValueError) as error:  # ValueError: memory of a channel that is being closed
        raise _cancelled(session) from error
    if channel.is_closed:  # `fail` may have been before this call was registered
        raise _cancelled(session)


def _cancelled(session: int, why: str = "its client, or the connection to it, is gone") -> StatusError:
    return StatusError(Code.CANCELLED, f"a callback of session {session} has no answer: {why}")
