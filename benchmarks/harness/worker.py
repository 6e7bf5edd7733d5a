"""A backend's process: runs a benchmark's rounds on request, and sleeps in between.

Requests come on standard input and replies go to what was standard output; what is printed goes to standard error.
It ends when its input does, so it does not outlive the benchmark, and it ends itself, with the stack of every thread
on standard error, when a request passes its deadline.
"""

import faulthandler
import os
import pkgutil
import sys
import traceback
from io import FileIO

import msgspec

from benchmarks.harness.benchmark import Round
from benchmarks.harness.messages import Failed, Measured, Prepared, PrepareRequest, Reply, Request


class Worker:
    """Holds the one benchmark that this process runs."""

    def __init__(self) -> None:
        self.round: Round | None = None

    def answer(self, request: Request) -> Reply:
        try:
            if isinstance(request, PrepareRequest):
                if request.settings.has_batch_threads:
                    become_batch()
                self.round = pkgutil.resolve_name(request.function)(request.settings)
                return Prepared()
            if self.round is None:
                return Failed("a round was asked for before a benchmark was prepared")
            return Measured(dict(self.round()))
        except Exception:
            return Failed(traceback.format_exc())


def become_batch() -> None:
    """From now on this thread, and all threads and processes that it starts, are scheduled as batch threads."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def replies_alone() -> FileIO:
    """Reserve standard output for replies. From now on, printed text (such as gloo's) is written to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def main() -> None:
    replies = replies_alone()
    decoder = msgspec.json.Decoder(Request)
    worker = Worker()
    for line in sys.stdin.buffer:
        request = decoder.decode(line)
        faulthandler.dump_traceback_later(request.deadline, exit=True)
        reply = worker.answer(request)
        faulthandler.cancel_dump_traceback_later()
        replies.write(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    main()
