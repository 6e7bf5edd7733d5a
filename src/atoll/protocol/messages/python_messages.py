"""Messages for colocated Python, from a front end to hosts, and between a worker and its Python processes.

Only the session's own Python process loads the pickles and accesses the storage locations in these messages.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.sandbox.grants import Sandbox
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.decodable import decodable
from atoll.errors import Status, invalid
from atoll.ir.types import Shape, Sharding
from atoll.protocol.messages.opening_messages import Message
from atoll.wire.framing import NO_MESSAGE

Setting = bool | int | float | str | None
_MAGIC = b"atoll.python\0"
_LENGTH_BYTES = 4


class ClientSettings(Message, frozen=True):
    """The working directory, sys.path and JAX configuration of the client's process.

    A host ignores directories that it does not have.
    """

    directory: str = ""
    path: tuple[str, ...] = ()
    config: dict[str, Setting] = msgspec.field(default_factory=dict)


def with_settings(settings: ClientSettings, text: bytes) -> bytes:
    """Return a program text that also contains the settings of the client's process."""
    head = msgspec.msgpack.encode(settings)
    return _MAGIC + len(head).to_bytes(_LENGTH_BYTES, "little") + head + text


def split_settings(data: bytes) -> tuple[ClientSettings, bytes]:
    """Return the settings, which are the default for clients without Atoll's plug-in, and the program text itself.

    Raise INVALID_ARGUMENT if the settings cannot be decoded.
    """
    if not data.startswith(_MAGIC):
        return ClientSettings(), data
    start = len(_MAGIC) + _LENGTH_BYTES
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    try:
        return msgspec.msgpack.decode(data[start:end], type=decodable(ClientSettings)), data[end:]
    except NO_MESSAGE as error:
        raise invalid(f"cannot decode the settings of a Python function: {error}") from None


class PythonHosts(Message, frozen=True, tag=1):
    """Start a session's Python processes, one per host of a set of islands on which the session has devices.

    `devices` are the client's IDs, in the order of the assignment that accompanies this message.
    """

    devices: tuple[int, ...]
    settings: ClientSettings


class PythonFunction(Message, frozen=True, tag=2):
    """A function with its specialization, as JAX's colocated Python pickles it, and the client's settings."""

    name: str
    text: bytes
    settings: ClientSettings = ClientSettings()


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """An array in storage: `name` at `location`, which is an absolute path or a URL.

    `sharding` has the client's device IDs. `dtype` is empty for arrays to write, which have their own dtype.
    """

    location: str
    name: str
    shape: Shape
    sharding: Sharding
    dtype: str = ""


class WriteArrays(Message, frozen=True, tag=3):
    """A function that stores its arguments, each host its own shards, and returns nothing."""

    name: str
    arrays: tuple[StoredArray, ...]
    timeout_seconds: float


class ReadArrays(Message, frozen=True, tag=4):
    """A function without arguments that returns arrays from storage, each host its own shards."""

    name: str
    arrays: tuple[StoredArray, ...]
    timeout_seconds: float


PythonSource = PythonFunction | WriteArrays | ReadArrays
PythonProgram = PythonHosts | PythonSource


class PythonOptions(msgspec.Struct, frozen=True):
    """The options of a Python process. `descriptor` is its end of the link to the worker.

    `devices[i]` are the client's IDs of the devices of the program's host i, in that host's order, and `rank` is this
    host. The hosts are those of an island or of a world. With several hosts, their processes join one JAX program at
    `coordinator_address`, and reach each other at their `hostname`. `sandbox` states what the process may see and use.
    `mechanisms` are those of this system to enforce it, or None if they are not known yet.
    """

    descriptor: int
    devices: tuple[tuple[int, ...], ...]
    rank: int
    settings: ClientSettings
    sandbox: Sandbox
    coordinator_address: str
    hostname: str
    mechanisms: Mechanisms | None = None


# ---- worker -> process


class Load(Message, frozen=True, tag=10):
    """Load a function under this name. With `recompile`, an earlier process of the session had it and has ended."""

    function: str
    source: PythonSource
    recompile: bool = False


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """The local shards of an argument as feeds, in the order of the sharding's devices."""

    position: int
    dtype: str
    shape: tuple[int, ...]  # of each shard
    feeds: tuple[int, ...]


class Call(Message, frozen=True, tag=11):
    """Call a function after earlier calls of the same stream, and once the feeds of its arguments have arrived.

    If it `asks`, the process requests each feed with `Wanted` instead. If it `holds` and fails, the later calls of the
    stream wait for `Resume`.
    """

    number: int
    function: str
    stream: int
    arguments: tuple[Argument, ...]
    results: tuple[int, ...]  # positions of results that have shards on this host
    asks: bool = False
    holds: bool = False


class InputFailed(Message, frozen=True, tag=12):
    """Cancel a call because one of its arguments failed."""

    number: int
    status: Status


class Drop(Message, frozen=True, tag=13):
    """Drop a function. Calls that were sent before still run."""

    function: str


class Resume(Message, frozen=True, tag=14):
    """Start the calls that wait behind this one (`Call`, `Hold`), which has failed here and has ended on all hosts."""

    number: int


class Hold(Message, frozen=True, tag=15):
    """Have later calls of the stream wait for `Resume`, in place of a call that has failed before it was sent."""

    number: int
    stream: int


ToPython = Load | Call | InputFailed | Drop | Resume | Hold

# ---- process -> worker


class PythonReady(Message, frozen=True, tag=20):
    """Report that the process has started and joined those of the program's other hosts.

    If `isolated`, it has its own namespaces.
    """

    isolated: bool


class Loaded(Message, frozen=True, tag=21):
    """Answer Load: the function can be called, or `status` has the error."""

    function: str
    status: Status


class Returned(Message, frozen=True, tag=22):
    """Answer Call. `results` are the feeds of each result's local shards, or `status` has the error."""

    number: int
    status: Status
    results: tuple[tuple[int, ...], ...] = ()


class Wanted(Message, frozen=True, tag=23):
    """Request a feed of the arguments of a call that asks for them. Each feed can be requested once."""

    number: int
    feed: int


FromPython = PythonReady | Loaded | Returned | Wanted
