"""Run an honest client beside hostile ones, in a separate process: `python -m tests.grpc.http2.honest_peer PATH`.

The server echoes its messages. For each input line, this process prints the number of calls since the previous line,
and two durations of the longest call in milliseconds: the total, and the time in which this process was ready to run
and had no CPU.
"""

from __future__ import annotations

import sys
import time

from atoll.grpc.http2 import frames
from tests.fuzzing.requests import read_requests
from tests.grpc.http2.http2_peer import REQUEST, Peer, frame, message

PAUSE = 0.002  # between two calls, so that it notices stalls without keeping the machine busy


def waited() -> float:
    """Return the seconds in which this thread was ready to run and had no CPU."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def main() -> None:
    asked, over = read_requests()
    count, longest, delay, total = 0, 0.0, 0.0, 0
    with Peer(sys.argv[1]) as peer:
        peer.send(peer.headers(1, REQUEST))
        print("ready", flush=True)
        while not over.wait(PAUSE):
            begin, before = time.monotonic(), waited()
            peer.send(frame(frames.DATA, 0, 1, message(b"honest")))
            assert peer.body(1, 11) == message(b"honest")
            seconds = time.monotonic() - begin
            count, total = count + 1, total + 1
            if seconds > longest:
                longest, delay = seconds, waited() - before
            if asked.is_set():
                asked.clear()
                print(count, f"{1000 * longest:.1f} {1000 * delay:.1f}", flush=True)
                count, longest, delay = 0, 0.0, 0.0
            if total % 1000 == 0:
                peer.send(frames.window_update(0, 11_000), frames.window_update(1, 11_000))


if __name__ == "__main__":
    main()
