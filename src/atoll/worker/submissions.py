"""The controller's messages for the executor's thread, some of which the submitting thread handles itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Submissions:
    """Has messages handled in order, each by the executor's thread or by the thread that submits it.

    Waking up the executor's thread takes longer than reading a small array. The submitting thread therefore handles
    short messages while the executor's thread is idle.

    Invariants: one message is handled at a time, and submitted messages are handled in order.

    Args:
        messages: The queue of the executor's thread. It also gets messages from elsewhere, which have no order.
        handle: Handles a message, on either thread.
        is_short: Returns whether a message is handled within microseconds, without waiting. Called when all messages
            that were submitted before have been handled.
        on_handled: Called when the submitting thread has handled a message.
    """

    def __init__(
        self,
        messages: SimpleQueue[Any],
        handle: Callable[[Any], None],
        is_short: Callable[[Any], bool],
        on_handled: Callable[[], None],
    ) -> None:
        self._messages = messages
        self._handle = handle
        self._is_short = is_short
        self._on_handled = on_handled
        self._submitting = threading.Lock()
        self._handling = threading.Lock()
        self._queued = 0  # messages that were queued here
        self._handled = 0  # of these

    def add(self, message: Any) -> None:
        """Handle a message, or queue it. Safe on any thread."""
        with self._submitting:
            if self._queued == self._handled and self._is_short(message) and self._is_handled_now(message):
                self._on_handled()
            else:
                self._queued += 1
                self._messages.put(message)

    def _is_handled_now(self, message: Any) -> bool:
        """Handle the message if the executor's thread is idle. Return whether it was handled."""
        if not self._handling.acquire(blocking=False):
            return False
        try:
            self._handle(message)
            return True
        finally:
            self._handling.release()

    def try_run(self, function: Callable[[], bool]) -> bool:
        """Call a function while no message is handled, and return its result. Return False if that would wait."""
        if not self._handling.acquire(blocking=False):
            return False
        try:
            return function()
        finally:
            self._handling.release()

    def run(self, function: Callable[[], None]) -> None:
        """Call a function while no message is handled."""
        with self._handling:
            function()

    def handle(self, message: Any, is_submitted: bool) -> None:
        """Handle a message of the queue, on the executor's thread. `is_submitted`: it was queued by `add`."""
        with self._handling:
            try:
                self._handle(message)
            finally:
                self._handled += is_submitted
