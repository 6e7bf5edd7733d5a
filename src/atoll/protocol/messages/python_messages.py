"""Colocated Python: what a front end sends of it, and what a worker and its Python processes say to each other.

The pickles inside are opened, and the places of arrays that are stored are visited, by the session's own process alone.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.sandbox.grants import Sandbox
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.errors import Status, invalid
from atoll.ir.types import Shape, Sharding
from atoll.protocol.messages.opening_messages import Message

Setting = bool | int | float | str | None
_MAGIC = b"atoll.python\0"
_LENGTH_BYTES = 4


class ClientSettings(Message, frozen=True):
    """The working directory, sys.path and JAX's configuration of the client's process.

    What does not exist on a host is left out there.
    """

    directory: str = ""
    path: tuple[str, ...] = ()
    config: dict[str, Setting] = msgspec.field(default_factory=dict)


def with_settings(settings: ClientSettings, text: bytes) -> bytes:
    """A program text that brings along the settings of the process that made it."""
    head = msgspec.msgpack.encode(settings)
    return _MAGIC + len(head).to_bytes(_LENGTH_BYTES, "little") + head + text


def split_settings(data: bytes) -> tuple[ClientSettings, bytes]:
    """The settings and the text itself. A client without Atoll's plug-in brings none. Raises INVALID_ARGUMENT."""
    if not data.startswith(_MAGIC):
        return ClientSettings(), data
    start = len(_MAGIC) + _LENGTH_BYTES
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    try:
        return msgspec.msgpack.decode(data[start:end], type=ClientSettings), data[end:]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"a Python function with settings that are none: {error}") from None


class PythonHosts(Message, frozen=True, tag=1):
    """Opens a session's Python processes, one on each host of an island on which the session has devices.

    `devices` are the client's ids, in the order of the assignment that comes along.
    """

    devices: tuple[int, ...]
    settings: ClientSettings


class PythonFunction(Message, frozen=True, tag=2):
    """A function as JAX's colocated Python pickles it, with its specialization, and the settings that it came with."""

    name: str
    text: bytes
    settings: ClientSettings = ClientSettings()


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """An array in storage: `name` at `location`, which is an absolute path or a URL.

    `sharding` tells which device, by the client's id, has which part. What is written has its own dtype.
    """

    location: str
    name: str
    shape: Shape
    sharding: Sharding
    dtype: str = ""


class WriteArrays(Message, frozen=True, tag=3):
    """A function that stores its arguments, each host its own shards, and gives nothing."""

    name: str
    arrays: tuple[StoredArray, ...]
    timeout_seconds: float


class ReadArrays(Message, frozen=True, tag=4):
    """A function that gives arrays from storage, each host its own shards, and takes nothing."""

    name: str
    arrays: tuple[StoredArray, ...]
    timeout_seconds: float


PythonSource = PythonFunction | WriteArrays | ReadArrays
PythonProgram = PythonHosts | PythonSource


class PythonOptions(msgspec.Struct, frozen=True):
    """How a process is started. `descriptor` is its end of its link to the worker.

    `devices[i]` are the client's ids of the devices of the island's host i, in the order in which that host counts
    them; `rank` is this host. With several hosts, their processes join one JAX program at the address
    `coordinator_address`, and reach one another at the `hostname` of each. `sandbox` is what the process may see and
    use, and `mechanisms` what this system has to hold it to that; None: not known yet.
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
    """Loads a function under this name; `again` where an earlier process of the session had it and has ended."""

    function: str
    source: PythonSource
    recompile: bool = False


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """The local shards of an argument, each a feed: in the order of the sharding's devices."""

    position: int
    dtype: str
    shape: tuple[int, ...]  # of each shard
    feeds: tuple[int, ...]


class Call(Message, frozen=True, tag=11):
    """Calls a function, after the calls before it of the same stream, and once its arguments' feeds have arrived. Where
    it `asks`, each comes when the process wants it.
    """

    number: int
    function: str
    stream: int
    arguments: tuple[Argument, ...]
    results: tuple[int, ...]  # the positions that have shards on this host
    asks: bool = False


class InputFailed(Message, frozen=True, tag=12):
    """An argument of the call could not be made: it is not to run."""

    number: int
    status: Status


class Drop(Message, frozen=True, tag=13):
    """The function will not be called any more; calls that were sent still run."""

    function: str


ToPython = Load | Call | InputFailed | Drop

# ---- process -> worker


class PythonReady(Message, frozen=True, tag=20):
    """The process is up, and has joined those of the island's other hosts. `isolated`: it has namespaces of its own."""

    isolated: bool


class Loaded(Message, frozen=True, tag=21):
    """A function can be called, or the status says why not."""

    function: str
    status: Status


class Returned(Message, frozen=True, tag=22):
    """A call has returned. `results` are the feeds of each result's local shards; or the status says what failed."""

    number: int
    status: Status
    results: tuple[tuple[int, ...], ...] = ()


class Wanted(Message, frozen=True, tag=23):
    """A call that asks for its arguments wants one of their feeds, once."""

    number: int
    feed: int


FromPython = PythonReady | Loaded | Returned | Wanted
