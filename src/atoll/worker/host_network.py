"""The interface through which a host exchanges the contents of shards with other hosts.

`StepRunner` passes Send, Receive, SendRows and ReceiveRows steps to a `HostNetwork`. `DataPortNetwork` sends bytes over
the data plane. The network of null hosts takes the time that a model computes (`engines.null_hosts.null_host`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from atoll.devices.device import DeviceArray, DeviceBackend
from atoll.errors import Code, Details, Kind, failed, failure
from atoll.host_services import host_data
from atoll.host_services.row_messages import packed, unpacked
from atoll.host_services.slabs import ArrayPart, assemble
from atoll.ir import plan as p
from atoll.ir.row_exchange import RowExchange
from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.transfers.channel import DataChannel
from atoll.transfers.dtypes import numpy_dtype
from atoll.transfers.host_memory import aligned
from atoll.transfers.piece_contents import Grouped
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.transfers.streams import STREAM_THRESHOLD
from atoll.transfers.transfer_engine import Contents
from atoll.worker.dispatch_unit import DispatchUnit, Read
from atoll.worker.grouped_sends import SMALL_BYTES, SendGroup, SentArray, are_grouped

# Up to this size, an array exists twice while it is assembled. The memory of its pieces is then reused, which is faster
# than freeing it piece by piece and using fresh pages.
KEPT_BYTES = 256 << 20
# Up to this size, the devices copy an array that the sender has lent. Larger copies are made while other threads run.
LENT_BYTES = 64 << 10
_NONE: Mapping[int, DataChannel] = MappingProxyType({})


class HostNetwork(Protocol):
    """A network between hosts. All methods are called on the executor's thread, and must not block."""

    def send(self, step: p.Send, unit: DispatchUnit, array: DeviceArray, release: Callable[[], None]) -> None:
        """Send the pieces of `step` to their hosts' inboxes, under the run's feed numbers.

        Add the remaining work to `unit.reads`, or a completion to `unit.completions`, so that the unit completes with
        it. Call `release` once, on any thread, when `array` is no longer read, unless this method raises.
        """

    def receive(self, step: p.Receive, run: m.Run) -> DeviceArray:
        """Return the array that consists of pieces in this host's inbox, which have all arrived.

        Raise StatusError if one of them failed.
        """

    def send_rows(
        self, step: p.SendRows, unit: DispatchUnit, arrays: Sequence[DeviceArray], release: Callable[[], None]
    ) -> None:
        """Send rows of the step's inputs as `send` does. The inputs determine how many rows are sent."""

    def receive_rows(self, step: p.ReceiveRows, unit: DispatchUnit) -> tuple[DeviceArray, DeviceArray | None]:
        """Return the array of the rows that have arrived, and its spans if it has any. Raise as `receive` does."""


def is_small_and_ready(array: DeviceArray) -> bool:
    return array.nbytes <= SMALL_BYTES and array.is_ready()


def wait_for_shards(shards: Sequence[Any]) -> None:
    """Wait until shards are computed. Raise the error of their computation."""
    for shard in shards:
        shard.block_until_ready()


class DataPortNetwork:
    """A network that sends bytes through the data port of `host`, on reader threads."""

    def __init__(self, backend: DeviceBackend, data_port: DataPort, host: int) -> None:
        self._backend = backend
        self._data_port = data_port
        self._inbox = data_port.inbox
        self._host = host

    def send(self, step: p.Send, unit: DispatchUnit, array: DeviceArray, release: Callable[[], None]) -> None:
        run = unit.plan_run.run
        shards = self._backend.shards(array)

        sent = SentArray(step, array, shards, release)
        last = unit.reads[-1].group if unit.reads else None
        if last is None or not last.try_add(sent):
            group = SendGroup(self, run)
            group.try_add(sent)
            unit.reads.append(Read(group.wait, group.read, group.read_nowait, group))

    def send_pieces(
        self, run: m.Run, host: int, pieces: Sequence[tuple[int, Contents]], channel: DataChannel | None
    ) -> None:
        """Send pieces, with their feeds, to a host. Small ones are sent in one message.

        Raise UNAVAILABLE if the host cannot be reached.
        """
        if host == self._host:
            for feed, contents in pieces:
                content = aligned(contents.nbytes)
                contents.write_into(content.data)
                self._inbox.put(run.session, feed, content)
            return
        if are_grouped(pieces):
            pieces = [(pieces[0][0], Grouped(pieces))]
        for feed, contents in pieces:
            send_to_host(self._data_port, self._host, host, run.session, feed, contents, channel)

    def receive(self, step: p.Receive, run: m.Run) -> DeviceArray:
        array = step.array
        dtype = numpy_dtype(array.dtype)
        taken = self._inbox.take_all(run.session, [run.host_feeds + piece.feed for piece in step.pieces])
        try:
            shards: list[Any] = [None] * len(array.shard_shapes)
            parts: dict[int, list[ArrayPart]] = {}
            nbytes = sum([memoryview(content).nbytes for content, _ in taken.values()])
            gives_back, are_lent = nbytes > KEPT_BYTES, False
            for piece in step.pieces:
                content, _ = taken[run.host_feeds + piece.feed]
                shape = tuple([stop - start for start, stop in piece.box])
                part = host_data.view(content, array.dtype, shape, None)
                is_own = not isinstance(content, memoryview)
                if shape == array.shard_shapes[piece.shard]:
                    # Reuse the memory in which the piece landed, unless the sender will.
                    is_lent = not is_own and nbytes <= LENT_BYTES
                    shards[piece.shard] = part if is_own or is_lent else host_data.copied(part)
                    are_lent |= is_lent
                else:
                    consumed = gives_back and is_own and dtype.kind != "T"
                    parts.setdefault(piece.shard, []).append(ArrayPart(piece.box, part, consumed))
            for number, shape in enumerate(array.shard_shapes):
                if shards[number] is None:
                    shards[number] = host_data.empty(shape, dtype)
                    assemble(shards[number], parts.pop(number, ()))
            received: DeviceArray = self._backend.put(array, shards, are_lent)
        finally:
            for _, done in taken.values():
                done()
        return received

    def send_rows(
        self, step: p.SendRows, unit: DispatchUnit, arrays: Sequence[DeviceArray], release: Callable[[], None]
    ) -> None:
        inputs = _OnHost([self._backend.shards(array) for array in arrays])
        # A large message may wait for its receiver's inbox, so it gets a separate read.
        is_large = _max_bytes(step, inputs.shards[0]) >= STREAM_THRESHOLD
        # Send to other hosts first, so that they can begin.
        messages = sorted(step.messages, key=lambda message: message[1] == self._host)
        reads = [[each] for each in messages] if is_large else [messages]
        left, lock = [len(reads)], threading.Lock()

        def hold() -> Callable[[], None]:
            """Protect the inputs for a message to this host, which is read in place."""
            with lock:
                left[0] += 1
            return done

        def done() -> None:
            with lock:
                left[0] -= 1
                is_last = not left[0]
            if is_last:
                release()

        def read(messages: Sequence[tuple[RowExchange, int, int]], channels: Mapping[int, DataChannel] = _NONE) -> None:
            run = unit.plan_run.run
            try:
                sent = sum(self._send_message(step, run, each, inputs.get(), hold, channels) for each in messages)
                unit.rows.append((sent, 0))
            finally:
                done()

        def read_nowait(messages: Sequence[tuple[RowExchange, int, int]]) -> bool:
            if not all(map(is_small_and_ready, arrays)):
                return False
            most = SMALL_BYTES + sum([each.nbytes for each in arrays])  # of one message, with its spans
            counts = Counter(host for _, host, _ in messages)
            sizes = {host: count * most for host, count in counts.items()}
            return self.try_send_reserved(sizes, partial(read, messages))

        wait = partial(wait_for_shards, [shard for each in inputs.shards for shard in each])
        unit.reads += [Read(wait, partial(read, messages), partial(read_nowait, messages)) for messages in reads]

    def _send_message(
        self,
        step: p.SendRows,
        run: m.Run,
        message: tuple[RowExchange, int, int],
        inputs: Sequence[Sequence[Any]],
        hold: Callable[[], Callable[[], None]],
        channels: Mapping[int, DataChannel],
    ) -> int:
        """Send a message to a host, and return its size in bytes."""
        exchange, host, number = message
        contents, feed = packed(step, exchange, host, inputs), run.host_feeds + number
        if host == self._host:
            self._inbox.put(run.session, feed, contents, hold())
        else:
            send_to_host(self._data_port, self._host, host, run.session, feed, contents, channels.get(host))
        return contents.nbytes

    def try_send_reserved(self, sizes: Mapping[int, int], send: Callable[[Mapping[int, DataChannel]], object]) -> bool:
        """Call `send` with the channels to hosts, each reserved for so many bytes in small pieces, and return True.

        Return False if a host has no channel, or if sending to it would wait for the host or for another thread. This
        host needs no channel.
        """
        reserved: dict[int, DataChannel] = {}
        try:
            for host, nbytes in sizes.items():
                if host == self._host:
                    continue
                channel = self._data_port.to_host_nowait(host)
                if channel is None or not channel.try_reserve(nbytes):
                    return False
                reserved[host] = channel
            send(reserved)
        finally:
            for channel in reserved.values():
                channel.release()
        return True

    def receive_rows(self, step: p.ReceiveRows, unit: DispatchUnit) -> tuple[DeviceArray, DeviceArray | None]:
        run = unit.plan_run.run
        feeds = [run.host_feeds + feed for feed in step.feeds]
        taken = self._inbox.take_all(run.session, feeds)
        try:
            shards, spans, nbytes = unpacked(step, [taken[feed][0] for feed in feeds], RECEIVE_BUFFERS.take_zeros)
        finally:
            for _, done in taken.values():
                done()
        unit.rows.append((0, nbytes))
        array = self._backend.put(step.array, shards)
        return array, None if step.spans_array is None else self._backend.put(step.spans_array, spans)


def _max_bytes(step: p.SendRows, shards: Sequence[Any]) -> int:
    """Return an upper bound for a message's bytes: all positions of these shards of the rows.

    A row may be at several positions.
    """
    found = 0
    for position, shard in zip(step.positions, shards, strict=True):
        start, stop = step.exchanges[0].source.boxes[position][0]
        found += shard.nbytes // max(1, shard.shape[0]) * (stop - start)
    return found


class _OnHost:
    """Shards of several arrays, which the first call of `get` copies to host memory. Safe to use from any thread."""

    def __init__(self, shards: list[Sequence[Any]]) -> None:
        self.shards = shards
        self._lock = threading.Lock()
        self._found: list[list[np.ndarray[Any, Any]]] | None = None

    def get(self) -> list[list[np.ndarray[Any, Any]]]:
        with self._lock:
            if self._found is None:
                self._found = [[np.asarray(shard) for shard in each] for each in self.shards]
            return self._found


def feeds_lost(host: int, receiver: int, lost: list[tuple[int, int]], why: str) -> m.FeedsLost:
    """Return the report of `host` about small pieces that may not have reached `receiver`."""
    text = f"the connection from host {host} to host {receiver} broke{why and f' ({why})'}, "
    text += "and contents that were being sent are lost"
    details = Details(Kind.LINK, hosts=(host, receiver), retriable=True)
    return m.FeedsLost(receiver, tuple(lost), failure(Code.UNAVAILABLE, text, details))


class SendPort(Protocol):
    """The method of a `DataPort` that `send_to_host` needs."""

    def to_host(self, host: int) -> Any: ...


def send_to_host(
    port: SendPort,
    sender: int,
    host: int,
    session: int,
    feed: int,
    contents: Contents,
    channel: DataChannel | None = None,
) -> None:
    """Send contents to another host, on `channel` if it is given.

    Raise UNAVAILABLE if the host cannot be reached; the controller then determines why.
    """
    try:
        (channel or port.to_host(host)).send_contents(session, feed, contents)
    except OSError as error:  # including ConnectError
        details = Details(Kind.LINK, hosts=(sender, host), retriable=True)
        raise failed(Code.UNAVAILABLE, f"host {sender} cannot reach host {host}: {error}", details) from error
