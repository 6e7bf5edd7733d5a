"""The responses of a session, numbered so that jaxlib's client can forget Python stacks.

The client keeps the stack of each request until a response names it as ended, and until it is done with all responses
of lower numbers. Some responses it is never done with: it keeps that of Init, and it does not count those to the
requests that its batcher makes (arrays that are destructed or deleted, and the futures of these deletions). Were one of
them numbered in the sequence, the client would forget nothing after it.

Invariant: the numbers of the sequence have no gap; all other responses have a number that is never reached, and name no
stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OUT_OF_SEQUENCE = 1 << 62


class ResponseStream:
    """Numbers responses and gives them to `write`, serialized.

    `ended_contexts` are the stacks to which no error can refer any more and of which the client does not know it yet.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self.on_response: Callable[[int], None] | None = None  # the number of the request that is answered
        self._next = 0
        self.ended_contexts: list[int] = []

    def send(self, response: Any, ended_context: int) -> None:
        """The next response of the sequence. The client may forget `ended_context`, unless it is 0."""
        meta = response.meta
        meta.seq_num = self._next
        self._next += 1
        if ended_context:
            meta.destroyed_user_context_ids.append(ended_context)
        if self.ended_contexts:
            meta.destroyed_user_context_ids.extend(self.ended_contexts)
            self.ended_contexts.clear()
        self._write(response.SerializeToString())
        if self.on_response is not None:
            self.on_response(meta.op_id)

    def send_out_of_sequence(self, response: Any, ended_context: int) -> None:
        """A failure, or a response that the client is never done with. The next of the sequence names the context."""
        response.meta.seq_num = OUT_OF_SEQUENCE
        if ended_context:
            self.ended_contexts.append(ended_context)
        self._write(response.SerializeToString())
        if self.on_response is not None:
            self.on_response(response.meta.op_id)
