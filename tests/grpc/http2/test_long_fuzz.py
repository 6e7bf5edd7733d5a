"""Tests of hostile HTTP/2 clients beside an honest one, on a real server in a separate process.

`make thorough` sends 100,000 frames and more, and prints what the honest client noticed.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode
from tests.grpc.http2.http2_peer import KEEP, REQUEST, Peer, frame, message, request
from tests.grpc.http2.test_fuzz import conversation, mutate

QUIET_SECONDS = 1.0  # to measure how long an honest call takes without other work
FRAMES = int(os.environ.get("ATOLL_TEST_FUZZED_FRAMES", "3000"))
SEED = 20250702
MAX_GROWTH = 50 << 20
MAX_CPU_MS = 50.0  # of one read of the event loop
SECONDS = 60.0
_SERVER = """
import asyncio, sys, time
from atoll.grpc import GrpcServer
from atoll.grpc.http2.http2_connection import Http2Connection
from atoll.wire.unauthenticated import UnauthenticatedConnections
from tests.grpc.serving import echo

def admitted(call):
    call.admit()
    echo(call)

longest = 0.0
handle = Http2Connection.buffer_updated

def timed(self, nbytes):
    global longest
    begin = time.thread_time()
    handle(self, nbytes)
    longest = max(longest, time.thread_time() - begin)

Http2Connection.buffer_updated = timed

# The turn of the loop that took longest: seconds, of these CPU time, and those without a CPU.
turn = (0.0, 0.0, 0.0)
last = (0.0, 0.0, 0.0)

def clocks():
    with open("/proc/thread-self/schedstat") as file:
        return time.monotonic(), time.thread_time(), int(file.read().split()[1]) / 1e9

def look(loop):
    global turn, last
    now = clocks()
    if last[0]:
        turn = max(turn, tuple(after - before for after, before in zip(now, last, strict=True)))
    last = now
    loop.call_later(0.001, look, loop)

async def main():
    keep, pause = lambda call: None, lambda call: call.pause()
    methods = {"/test.Test/Echo": admitted, "/test.Test/Keep": keep, "/test.Test/Pause": pause}
    server = GrpcServer(methods, strangers=UnauthenticatedConnections())
    await server.listen_unix(sys.argv[1])
    look(asyncio.get_running_loop())
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    print(server.statistics().calls_open, *(round(1000 * each, 1) for each in (longest, *turn)), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    path = str(tmp_path / "s")
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield path, psutil.Process(process.pid)
        process.stdin.close()
        calls, longest, turn, cpu, delay = process.stdout.readline().split()
        print(
            f"the longest read took {longest} ms of CPU time; the longest turn of the loop took {turn} ms, of these "
            f"{cpu} ms of CPU time, and for {delay} ms the server had no CPU"
        )
        assert int(calls) == 0
        assert float(longest) < MAX_CPU_MS
        assert process.wait(SECONDS) == 0


class Honest:
    """Process of an honest client. See `honest`."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.grpc.http2.honest_peer", path],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        assert self._stdout.readline() == "ready\n"

    def since(self) -> tuple[int, float, float]:
        """Return the calls since the last call, and the longest one's milliseconds, in total and without a CPU."""
        print(file=self._stdin, flush=True)
        count, longest, delay = self._stdout.readline().split()
        return int(count), float(longest), float(delay)

    def close(self) -> None:
        self._stdin.close()
        assert self._process.wait(SECONDS) == 0
        self._stdout.close()


# ---- hostile input: the bytes of one connection, and their number of frames


def rapid_resets(source: random.Random, peer: Peer) -> list[bytes]:
    numbers = range(1, 2 * source.randint(2, 300), 2)
    return [part for each in numbers for part in (peer.headers(each, KEEP), frames.rst_stream(each, ErrorCode.CANCEL))]


def continuations(source: random.Random, peer: Peer) -> list[bytes]:
    piece = bytes(source.choice((0, 1, 100, 10_000)))
    return [frame(frames.HEADERS, 0, 1), *[frame(frames.CONTINUATION, 0, 1, piece)] * source.randint(1, 200)]


def header_bomb(source: random.Random, peer: Peer) -> list[bytes]:
    """Return one entry of the compression table, with references of one byte each."""
    bomb = b"\x40\x01x\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * source.randint(1, 10_000)
    return [frame(frames.HEADERS, frames.END_HEADERS, 1, peer.encoder.encode(REQUEST) + bomb)]


def huge_headers(source: random.Random, peer: Peer) -> list[bytes]:
    block = peer.encoder.encode(request("/test.Test/Keep", ("x", "y" * source.choice((100, 8000, 60_000, 70_000)))))
    return [frame(frames.HEADERS, frames.END_HEADERS, number, block[:16384]) for number in range(1, 19, 2)]


def settings(source: random.Random, peer: Peer) -> list[bytes]:
    values = [(source.randrange(1, 8), source.choice((0, 1, 16384, 65535, 2**31 - 1, 2**32 - 1))) for _ in range(3)]
    return [frames.settings_frame(values[: source.randint(0, 3)])] * source.randint(1, 1500)


def pings(source: random.Random, peer: Peer) -> list[bytes]:
    return [frame(frames.PING, source.choice((0, 1)), 0, b"12345678")] * source.randint(1, 3000)


def windows(source: random.Random, peer: Peer) -> list[bytes]:
    """Return a stream whose window is closed and opened by settings and updates, down to zero and beyond all limits."""
    games = [peer.headers(1, REQUEST), frame(frames.DATA, 0, 1, message(bytes(9000)))]
    for _ in range(source.randint(1, 200)):
        number, size = source.choice((0, 1, 1, 3)), source.choice((0, 1, 100, 65535, 2**31 - 1))
        opens = frames.window_update(number, size)
        games.append(source.choice((opens, frames.settings_frame([(4, source.choice((0, 1, 70_000, 2**31 - 1)))]))))
    return games


def half_closed(source: random.Random, peer: Peer) -> list[bytes]:
    ends = frames.END_HEADERS | frames.END_STREAM
    first = [peer.headers(1, REQUEST, ends), frame(frames.DATA, 0, 1, b"x"), peer.headers(1, REQUEST)]
    return first + [frame(frames.DATA, frames.END_STREAM, source.choice((1, 3, 5)), b"")] * source.randint(1, 50)


def slow(source: random.Random, peer: Peer) -> list[bytes]:
    """Return an announced message that does not arrive."""
    size = source.choice((100, 16_000, 16_385, 1 << 30)).to_bytes(4, "big")
    return [peer.headers(1, KEEP), frame(frames.DATA, 0, 1, b"\0" + size + b"some of it")]


def mutations(source: random.Random, peer: Peer) -> list[bytes]:
    return [mutate(conversation()[1:], source)] + [b""] * (len(conversation()) - 2)


def random_frames(source: random.Random, peer: Peer) -> list[bytes]:
    return [
        frame(
            source.choice((*range(10), source.randrange(256))),
            source.choice((0, 1, 4, 5, 8, 0x2D, source.randrange(256))),
            source.choice((0, 1, 3, 5, source.getrandbits(32))),
            source.randbytes(source.choice((0, 4, 5, 8, 40))),
        )
        for _ in range(source.randint(1, 30))
    ]


ATTACKS: tuple[Callable[[random.Random, Peer], list[bytes]], ...] = (
    rapid_resets,
    continuations,
    header_bomb,
    huge_headers,
    settings,
    pings,
    windows,
    half_closed,
    slow,
    mutations,
    random_frames,
)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_hostile_frames_cost_an_honest_client_nothing(server: tuple[str, psutil.Process]) -> None:
    path, process = server
    source, sent, open_ = random.Random(SEED), 0, []
    honest = Honest(path)
    for attack in ATTACKS:  # the costs of first uses
        with Peer(path) as peer:
            peer.send(*attack(source, peer))
    honest.since()
    time.sleep(QUIET_SECONDS)
    _, alone, _ = honest.since()
    before = process.memory_info().rss
    begin = time.monotonic()
    while sent < FRAMES:
        peer = Peer(path)
        attack = source.choice(ATTACKS)
        hostile = attack(source, peer)
        peer.socket.settimeout(0.05)  # the test does not wait for clients that do not read
        with contextlib.suppress(OSError):
            peer.socket.sendall(b"".join(hostile))
        sent += len(hostile)
        open_.append(peer)
        if len(open_) > 8 or attack not in (slow, huge_headers):  # these connections remain open for a while
            open_.pop(source.randrange(len(open_))).socket.close()
    for peer in open_:
        peer.socket.close()
    seconds = time.monotonic() - begin
    count, longest, delay = honest.since()
    growth = process.memory_info().rss - before
    honest.close()
    print(
        f"\n{sent} frames in {seconds:.0f} s, {count} honest calls, longest {longest} ms, of which the client had no "
        f"CPU for {delay} ms ({alone} ms without the fuzzer), growth {growth / 2**20:.1f} MiB"
    )
    assert count > 0
    assert growth < MAX_GROWTH
