"""Reads of arrays for the client: what is sent when the array is ready, and on which channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from atoll.devices.device import DeviceBackend
from atoll.errors import invalid
from atoll.host_services import host_data
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.host_services.slabs import row_major_parts
from atoll.ir import plan as p
from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import BufferContents, Filled, as_views
from atoll.transfers.transfer_engine import Contents
from atoll.worker.dispatch_unit import DispatchUnit, Read
from atoll.worker.future_arrays import FutureArray, live_array
from atoll.worker.grouped_sends import SMALL_BYTES
from atoll.worker.host_network import is_small_and_ready, wait_for_shards
from atoll.worker.joint_runs import JointRun
from atoll.worker.store import NO_ARRAY, Buffer, MemoryHolds


class ClientReads:
    """Makes the reads of a host, which other threads do if they have to wait.

    The memory of an array is protected from donation until it is read. `report` sends messages to the controller.
    """

    def __init__(
        self, backend: DeviceBackend, data_port: DataPort, holds: MemoryHolds, report: Callable[..., None]
    ) -> None:
        self._backend = backend
        self._data_port = data_port
        self._holds = holds
        self._report = report

    def read(self, step: p.Get, run: m.Run, values: dict[int, Buffer]) -> Read:
        """Return the read that sends an array to the client."""
        buffer = values[step.input]
        array = live_array(buffer)
        shards = self._backend.shards(array)
        release = self._holds.hold(buffer, len(shards))
        values[step.completion] = Buffer(NO_ARRAY, -1, None)
        feed = run.feeds[step.feed]

        def read(channel: DataChannel | None = None) -> None:
            try:
                channel = channel or self._receiver(run.session, feed)
                self._send_array(step, run.session, feed, channel, [np.asarray(shards[i]) for i in step.shards])
            except Exception:
                _raise_cause_of(buffer)
                raise
            finally:
                release()

        def read_nowait() -> bool:
            is_short = is_small_and_ready(array) and _sends_little(step, buffer)
            return is_short and self._try_send(run.session, feed, read)

        return Read(partial(wait_for_shards, [shards[i] for i in step.shards]), read, read_nowait)

    def _send_array(
        self,
        step: p.Get,
        session: int,
        feed: int,
        channel: DataChannel,
        shards: list[np.ndarray[Any, Any]],
    ) -> None:
        """Send an array in the layout that the client wants, without a copy of the whole if possible."""
        first, dtype = shards[0], shards[0].dtype
        if dtype.kind == "T":
            channel.send(session, feed, [host_data.encode_strings(first)])
            return
        if (
            step.strides is None
            and step.boxes == (tuple((0, size) for size in step.shape),)
            and first.flags.c_contiguous
        ):
            contents = host_data.bytes_of(first)
            if not self._try_send_to_script(session, feed, [BufferContents(as_views([contents]))]):
                channel.send_in_parts(session, feed, contents)
            return
        if step.strides is None and 0 not in step.shape:
            parts = list(row_major_parts(step.shape, step.boxes, shards))
            if not self._try_send_to_script(session, feed, parts):
                for part in parts:
                    channel.send_contents(session, feed, part, more=part is not parts[-1])
            return
        size, _ = host_data.region_bytes(dtype.itemsize, step.shape, step.strides)
        fill = Filled(size, lambda to: host_data.fill(to, dtype, step.shape, step.strides, step.boxes, shards))
        channel.send_contents(session, feed, fill)

    def read_all(self, step: p.GetAll, run: m.Run, values: dict[int, Buffer]) -> Read:
        """Return the read that sends shards of arrays to the client, one after the other."""
        numbers = dict.fromkeys(step.inputs)
        buffers = [values[value] for value in numbers]
        arrays = [live_array(buffer) for buffer in buffers]
        shards_of = dict(zip(numbers, map(self._backend.shards, arrays), strict=True))
        shards = [shards_of[value][i] for value, i in zip(step.inputs, step.shards, strict=True)]
        counts = map(len, shards_of.values())
        release = self._holds.hold_all(zip(buffers, counts, strict=True))
        values[step.completion] = Buffer(NO_ARRAY, -1, None)
        feed = run.feeds[step.feed]

        def read(channel: DataChannel | None = None) -> None:
            try:
                contents = [np.asarray(shard) for shard in shards]
                if any(each.dtype.kind == "T" for each in contents):
                    raise invalid("strings cannot be read together with other arrays")
                whole = b"".join([each.tobytes() for each in contents])
                if not self._try_send_to_script(run.session, feed, [BufferContents(as_views([whole]))]):
                    (channel or self._receiver(run.session, feed)).send_in_parts(run.session, feed, whole)
            except Exception:
                for buffer in buffers:
                    _raise_cause_of(buffer)
                raise
            finally:
                release()

        def read_nowait() -> bool:
            if sum([array.nbytes for array in arrays]) > SMALL_BYTES or not all([each.is_ready() for each in arrays]):
                return False
            return self._try_send(run.session, feed, read)

        return Read(partial(wait_for_shards, shards), read, read_nowait)

    def send(
        self,
        session: int,
        wanted: ReadWanted,
        buffer: Buffer,
        start: Callable[[Callable[[], None]], bool],
        otherwise: Callable[[], None],
    ) -> bool:
        """Send the first shard of a small array, and return True. Return False if it cannot be sent.

        Results of runs that may fail late are sent only if the proxy knows that the run has ended. Otherwise a launch
        reads them, when their run has ended on all hosts.

        If the array is not ready, `start` has a thread send it, or returns False. If that thread cannot send it, it
        calls `otherwise`. The caller lets no unit start meanwhile, so none can donate the memory. Raise StatusError if
        the array was deleted.
        """
        array = live_array(buffer)
        if isinstance(array, FutureArray) or (buffer.may_fail_late and not wanted.has_ended):
            return False
        if buffer.spec is None or buffer.spec.dtype == "string":
            return False
        if array.nbytes > SMALL_BYTES:
            return False
        shards = self._backend.shards(array)

        def send(channel: DataChannel) -> None:
            contents = np.ascontiguousarray(np.asarray(shards[0]))
            channel.send(session, wanted.feed, [host_data.bytes_of(contents)])

        if array.is_ready():
            return self._try_send(session, wanted.feed, send)
        release = self._holds.hold(buffer, len(shards))

        def send_later() -> None:
            try:
                shards[0].block_until_ready()
                send(self._data_port.to_client(session))
            except Exception:  # a launch of the read has the error as well, and reports it
                otherwise()
            finally:
                release()

        if start(send_later):
            return True
        release()
        return False

    def report(self, step: p.Report, unit: DispatchUnit, values: dict[int, Buffer]) -> Read:
        """Return the read that reports the value of an array with one element to the controller."""
        buffer = values[step.input]
        array = live_array(buffer)
        shards = self._backend.shards(array)
        release = self._holds.hold(buffer, len(shards))

        def read() -> None:
            try:
                self._report(m.ValueReported(unit.sequence, int(np.asarray(shards[0]).reshape(()))))
            finally:
                release()

        def read_nowait() -> bool:
            if not is_small_and_ready(array):
                return False
            read()
            return True

        return Read(shards[0].block_until_ready, read, read_nowait)

    def _try_send(self, session: int, feed: int, read: Callable[[DataChannel], None]) -> bool:
        """Read and send a small array unless that would wait. Return whether it was sent.

        The thread may be the one that receives the controller's messages, and other threads may wait inside this
        channel for a client that does not read. The channel is therefore reserved while it is checked and used.
        """
        to_client = feed in SCRIPT_FEEDS
        channel = (self._data_port.to_client_nowait if to_client else self._data_port.to_proxy_nowait)(session)
        if channel is None:
            return False
        if not channel.try_reserve(SMALL_BYTES):
            return False
        try:
            read(channel)
        finally:
            channel.release()
        return True

    def _try_send_to_script(self, session: int, feed: int, parts: Sequence[Contents]) -> bool:
        """Send contents for the client's process on its own channel, if possible. Return whether they were sent."""
        return feed in SCRIPT_FEEDS and self._data_port.send_to_script(session, feed, parts)

    def _receiver(self, session: int, feed: int) -> DataChannel:
        """Return the channel to the session's proxy or, if the feed is for the client's process, the shortest one."""
        if feed in SCRIPT_FEEDS:
            return self._data_port.to_client(session)
        return self._data_port.to_proxy(session)


def _sends_little(step: p.Get, buffer: Buffer) -> bool:
    """Return whether the contents of a small array are short. Strings, and gaps between elements, are not."""
    if buffer.spec is None or buffer.spec.dtype == "string":
        return False
    if step.strides is None:
        return True
    return len(step.strides) == len(step.shape) and host_data.region_bytes(1, step.shape, step.strides)[0] < SMALL_BYTES


def _raise_cause_of(buffer: Buffer) -> None:
    """Raise the cause of the failure of the run that made the buffer, if that is a joint run with a known cause."""
    if isinstance(buffer.run, JointRun):
        buffer.run.raise_cause()
