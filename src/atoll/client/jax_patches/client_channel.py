"""The client's data channel to its proxy, and its channels to hosts: calls of callables, reads and writes of arrays.

- **Calls.** A program is compiled with the numbers of its callables (`client/jax_patches/host_callbacks.py`). One
  thread reads the workers' calls. Each call runs on a separate thread, because callbacks may wait for each other and
  may use JAX on Atoll.
- **Reads.** Contents of arrays arrive for `read_table`.
- **Writes.** The proxy asks for the contents of large arrays, which `write_table` sends. Small ones are put into slots
  of memory that the proxy and this process share (`small_write_table`).

A host on this machine opens a channel to this process through the proxy. This process opens those to other hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from atoll.client.jax_patches.read_table import ReadTable
from atoll.client.jax_patches.small_write_table import SmallWriteTable
from atoll.client.jax_patches.write_table import WriteTable
from atoll.client.latch import Latch
from atoll.decodable import decodable
from atoll.errors import AtollError, ConnectError, traceback_of
from atoll.host_services.calls.call_messages import (
    GREETING,
    Arrived,
    Call,
    CallMessage,
    Dial,
    DirectWanted,
    Raised,
    Released,
    Returned,
    SlotsWanted,
    Unread,
    Wanted,
    Written,
    decode,
    encode,
    first_call,
    is_notice,
    packed,
    unpacked,
)
from atoll.host_services.calls.call_threads import Threads
from atoll.protocol.callbacks import CALLBACKS_REQUEST, CallbackAddress
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.transfers.channel import DataChannel, OnMemory
from atoll.transfers.shared_slots import SlotWriter
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address, parse_address
from atoll.wire.tls.identity import Certificate, Identity

_log = logging.getLogger(__name__)

Callback = Callable[..., Sequence[Any]]

# Maximum channel memory that arguments may use at a time. Above that, arguments are copied.
_HELD_BYTES = 128 << 20
_SMALL_BYTES = 64 * 1024
# Timeout for the proxy's greeting on a new channel. Before the greeting, the proxy may answer calls itself.
_GREETING_SECONDS = 10.0
# Timeout for the greeting on a channel that only reads need. jaxlib's client can also read arrays.
_READ_SECONDS = 3.0
# Seconds until the proxy is asked again for channels that do not exist, such as after one was lost.
_ASK_SECONDS = 10.0
# Directory of files whose frames are not the user's.
_OURS = str(Path(__file__).parents[2])  # all of atoll


class ClientChannel:
    """The channels of this process, and what uses them: callables by number, reads and writes. Thread-safe.

    `submit(client, payload)` sends a plugin program to the client's proxy and returns the proxy's answer.
    """

    def __init__(self, submit: Callable[[Any, bytes], Any]) -> None:
        self._submit = submit
        self._callbacks: dict[int, Callback] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._threads = Threads()
        self._senders = Threads()  # not those of calls, which may wait until contents have been sent
        self._channel: DataChannel | None = None
        self._direct: dict[DataChannel, int] = {}  # channels to hosts that bypass the proxy, with the host
        self._dialed: dict[int, str] = {}  # addresses of hosts on other machines to which a channel is open or dialed
        self.proxy = Address()  # address at which the client reached the proxy, if it is in another process
        self._loaded: Any = None  # the proxy's answer, which reserves the data channel while it is referenced
        self.reads = ReadTable(submit)
        self.writes = WriteTable(submit, self._senders.run_or_wait)
        self.small_writes = SmallWriteTable(submit)
        self._unreachable: set[str] = set()  # addresses of which the user knows that they cannot be dialed
        self._asked = -math.inf  # when direct channels were last asked for
        self._wants_slots = False  # whether the proxy was asked for slots
        self._client: Any = None  # the client of the channel
        self._process = os.getpid()
        self._refused = False  # whether the channel could not be opened for reads
        self._held: dict[int, int] = {}  # bytes of channel memory in use by arguments, by the feed of the call

    def add(self, client: Any, callbacks: Sequence[Callback]) -> tuple[int, ...]:
        """Add the callables of one program and return their numbers. Raise JaxRuntimeError or ConnectError."""
        with self._lock:
            if self._channel is None or self._channel.is_closed:
                self._connect(client)
            numbers = tuple(next(self._numbers) for _ in callbacks)
            self._callbacks.update(zip(numbers, callbacks, strict=True))
            return numbers

    def receives_from(self, client: Any) -> bool:
        """Return whether the channel of this client's proxy is open in this process, after trying once to open it."""
        if self._process != os.getpid():  # in a forked child, whose locks may be held forever
            return False
        if self._receives(client):
            return True
        with self._lock:
            if self._refused or self._client not in (None, client):
                return False
            if self._channel is None or self._channel.is_closed:
                try:
                    self._connect(client, _READ_SECONDS)
                except (RuntimeError, ConnectError, OSError):  # JaxRuntimeError is a RuntimeError
                    self._refused = True
            return self._receives(client)

    def sends_to(self, device: Any) -> bool:
        """Return whether there is a direct channel to the device's host. Without one, ask for them from time to time.

        Hosts on this machine open them themselves, and this process dials the others.
        """
        if device.host in self._direct.values():
            return self.receives_from(device.client)
        now = time.monotonic()
        if now - self._asked >= _ASK_SECONDS and self.receives_from(device.client):
            self._asked = now
            self._ask(DirectWanted())
        return False

    def has_slots(self, client: Any) -> bool:
        """Return whether this process shares slots with this client's proxy. The first call asks the proxy for them."""
        if self.small_writes.is_open:
            return self.receives_from(client)
        if not self._wants_slots and self.receives_from(client):
            self._wants_slots = True
            self._ask(SlotsWanted())
        return False

    def _ask(self, wanted: DirectWanted | SlotsWanted) -> None:
        """Ask the proxy for what only processes on one machine can share. The channel may have been lost."""
        channel = self._channel
        if channel is not None and channel.is_local:
            with contextlib.suppress(AtollError, OSError):
                channel.send(0, first_call(0), encode(wanted))

    def _receives(self, client: Any) -> bool:
        channel = self._channel
        return channel is not None and not channel.is_closed and self._client is client

    def __len__(self) -> int:
        return len(self._callbacks)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove callables that will not be called again."""
        for number in numbers:
            self._callbacks.pop(number, None)

    def _connect(self, client: Any, seconds: float = _GREETING_SECONDS) -> None:
        try:
            self._threads.prepare()  # an exit handler can start no thread since Python 3.12
            self._senders.prepare()
        except RuntimeError as error:
            self._release_threads()
            raise ConnectError(
                f"a connection for callbacks needs threads: {error}. "
                "Run a function with a callback before the script ends"
            ) from None
        try:
            self._open_channel(client, seconds)
        except BaseException:
            self._release_threads()
            raise

    def _release_threads(self) -> None:
        self._threads.release()
        self._senders.release()

    def _open_channel(self, client: Any, seconds: float) -> None:
        self._loaded = self._submit(client, CALLBACKS_REQUEST)
        where = msgspec.json.decode(self._loaded.fingerprint, type=decodable(CallbackAddress))
        address = parse_address(where.address)
        if self.proxy.host:  # the proxy does not know the name by which this process reaches it
            address = replace(address, host=self.proxy.host)
        channel = DataChannel.connect(address, where.session, where.secret, timeout=seconds)
        greeted = Latch()
        arguments = (channel, greeted, lambda descriptor: self.small_writes.open(SlotWriter(descriptor)))
        threading.Thread(target=self._receive, args=arguments, name="atoll-callbacks", daemon=True).start()
        if not greeted.wait(seconds) or channel.is_closed:
            channel.close()
            raise ConnectError(
                f"the proxy at {address} did not answer on a connection for callbacks within {seconds:.0f} s"
            )
        self._wants_slots = False
        self._channel, self._client = channel, client

    def clear_cache(self) -> None:
        """Remove all callables and close the channels, because the client was closed."""
        with self._lock:
            channel, self._channel, self._loaded = self._channel, None, None
            self._callbacks.clear()
            self._client, self._refused, self._asked, self._wants_slots = None, False, -math.inf, False
        self._release_threads()
        self.reads.clear()
        self.writes.clear()
        self.small_writes.clear()
        for each in list(self._direct):
            each.shut_down()
        if channel is not None:
            channel.close()

    # ---- calls

    def _receive(
        self,
        channel: DataChannel,
        greeted: Latch,
        on_memory: OnMemory | None = None,
        is_dialed: bool = False,
    ) -> None:
        """Receive on a channel until it ends. If this process has dialed it, tell the proxy what has arrived."""

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            greeted.set()
            if piece.feed in SCRIPT_FEEDS:
                self.reads.take(piece.feed, content, piece.more, done)
                proxy = self._channel  # the present one, because the channel may outlive that of its `Dial`
                if is_dialed and not piece.more and proxy is not None:
                    with contextlib.suppress(AtollError, OSError):
                        proxy.send(0, first_call(0), encode(Arrived(piece.feed)))
                return
            try:
                message, offsets = decode(content)
            except AtollError:
                done()
                return
            if isinstance(message, Call):
                try:
                    self._threads.run(lambda: self._call(channel, piece.feed, message, content, offsets, done))
                except RuntimeError as error:  # no thread can be started
                    done()
                    channel.send(0, piece.feed, encode(Raised(f"no thread can call the function: {error}")))
                return
            done()
            if is_notice(piece.feed):  # otherwise a call, whose contents a host has chosen
                self._take_notice(message, channel)

        try:
            with contextlib.suppress(AtollError, OSError):
                channel.receive(on_piece, on_socket=self._take_direct, on_memory=on_memory)
        finally:
            channel.close()
            greeted.set()
            if self._channel is channel:
                self.small_writes.close()
            self._direct.pop(channel, None)
            self.reads.fail(())  # contents may have been lost with the channel

    def _take_notice(self, message: CallMessage, channel: DataChannel) -> None:
        match message:
            case Released(callbacks):
                self.remove(callbacks)
            case Unread():
                self.reads.fail(message.feeds, message.error)
            case Wanted():
                self.writes.send(message, self._direct_to(message.host), channel)
            case Written(write):
                self.writes.written(write)
            case Dial():
                self._start_dialing(message, channel)

    @property
    def channel(self) -> DataChannel | None:
        """The channel to the proxy that was opened last. It is None before the first call."""
        return self._channel

    @property
    def direct_channels(self) -> dict[DataChannel, int]:
        """The channels to hosts that bypass the proxy, each with its host."""
        return dict(self._direct)

    def _direct_to(self, host: int) -> DataChannel | None:
        """Return the latest direct channel to a host, or None."""
        found = [channel for channel, its in list(self._direct.items()) if its == host and not channel.is_closed]
        return found[-1] if found else None

    def _take_direct(self, sock: socket.socket, host: int) -> None:
        """Accept a channel from a host on this machine that bypasses the proxy."""
        channel = DataChannel(sock)
        self._direct[channel] = host
        try:
            threading.Thread(target=self._receive, args=(channel, Latch()), name="atoll-callbacks", daemon=True).start()
        except RuntimeError:  # in an exit handler, whose arrays go through the proxy
            del self._direct[channel]
            channel.close()
            return
        with contextlib.suppress(OSError):
            channel.send(0, first_call(0), encode(GREETING))

    def _start_dialing(self, dial: Dial, proxy: DataChannel) -> None:
        """Open a channel to a host on another machine, unless one is open to this address.

        Only the present proxy can request it.
        """
        if proxy is not self._channel or self._dialed.get(dial.host) == dial.address:
            return
        before = self._direct_to(dial.host)
        if before is not None:  # to the host before it restarted
            before.shut_down()
        self._dialed[dial.host] = dial.address
        try:
            threading.Thread(target=self._dial, args=(dial, proxy), name="atoll-callbacks", daemon=True).start()
        except RuntimeError:  # in an exit handler, whose arrays go through the proxy
            del self._dialed[dial.host]

    def _dial(self, dial: Dial, proxy: DataChannel) -> None:
        try:
            channel = DataChannel.connect(
                parse_address(dial.address),
                dial.session,
                dial.secret,
                None if dial.certificate is None else Identity(Certificate(*dial.certificate, "client", 0.0, 0.0)),
            )
            if channel.liveness is not None:
                channel.liveness.patience = dial.lease
            with self._lock:
                is_wanted = self._channel is proxy and self._dialed.get(dial.host) == dial.address
                if is_wanted:
                    self._direct[channel] = dial.host
            if is_wanted:
                self._receive(channel, Latch(), is_dialed=True)
            else:
                channel.close()
        except (AtollError, OSError) as error:
            if dial.address not in self._unreachable:
                self._unreachable.add(dial.address)
                _log.warning("large arrays of host %d are sent through the proxy: %s", dial.host, error)
        finally:
            if self._dialed.get(dial.host) == dial.address:
                del self._dialed[dial.host]

    def _call(
        self, channel: DataChannel, feed: int, call: Call, content: Any, offsets: list[int], done: Callable[[], None]
    ) -> None:
        callback = self._callbacks.get(call.callback)
        if callback is None:
            done()
            contents = encode(Raised("its function was deleted", cancelled=True))
        else:
            try:
                contents = _answer(callback, self._arguments(feed, call, content, offsets, done))
            except BaseException as error:
                contents = encode(Raised(traceback_of(error, _OURS)))
        try:
            channel.send(0, feed, contents)
        except Exception as error:
            try:
                channel.send(0, feed, encode(Raised(traceback_of(error, _OURS))))
            except Exception:
                channel.close()  # the proxy answers instead

    def _arguments(
        self, feed: int, call: Call, content: Any, offsets: list[int], done: Callable[[], None]
    ) -> list[Any]:
        """Return the arguments as read-only arrays, or None for tokens. Arrays release their memory when collected."""
        whole = np.frombuffer(content, np.uint8)
        if whole.nbytes <= _SMALL_BYTES or sum(list(self._held.values())) + whole.nbytes > _HELD_BYTES:
            whole = whole.copy()
            done()
        else:
            self._held[feed] = whole.nbytes
            weakref.finalize(whole, self._give_back, feed, done).atexit = False
        whole.flags.writeable = False
        return [unpacked(whole, each, offset) for each, offset in zip(call.arrays, offsets, strict=True)]

    def _give_back(self, feed: int, done: Callable[[], None]) -> None:
        """Release memory of the channel. Takes no lock, because it may run during a garbage collection."""
        self._held.pop(feed, None)
        done()


def _answer(callback: Callback, arguments: list[Any]) -> list[Any]:
    results = callback(*arguments)
    arguments.clear()
    types, contents = packed(results)
    return encode(Returned(types), contents)
