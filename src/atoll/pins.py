"""Versions of published arrays that a script has opened: `pin`, and `Pin.read`, which also `subscribe` uses."""

from __future__ import annotations

import itertools
import math
import operator
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.client.backend import is_embedded
from atoll.client.client_caches import client_cache
from atoll.client.plugin_programs import ask, is_atoll, status_errors, submit
from atoll.cluster.array_names import SEPARATOR, check_array_name
from atoll.decodable import decodable
from atoll.errors import BackendError, Code, Status, StatusError, invalid
from atoll.protocol.messages import VersionArray
from atoll.protocol.questions import DevicesAway, IslandsQuestion
from atoll.protocol.tree_forms import TreeForm
from atoll.protocol.version_requests import (
    MAX_LAUNCH_ID,
    READER_OF_RUN,
    OpenArrays,
    OpenedArrays,
    ReadArrays,
    write_request,
)

# A request waits at most this long at the controller. It is repeated, so that an interrupt ends it.
_POLL_SECONDS = 2.0
_MAX_NUMBER = (1 << 62) - 1


@dataclass(frozen=True)
class Version:
    """A version of published arrays, as `subscribe` returns it.

    Attributes:
      number: its number. Versions of a name are numbered from 1.
      tree: the arrays, in a tree of the same form as the published one.
    """

    number: int
    tree: Any
    # Large arrays, by content. An array that was published as two leaves of the tree has two.
    _contents: Mapping[int, Sequence[Any]] = field(default_factory=dict, repr=False, compare=False)
    _losses: int = field(default=0, repr=False, compare=False)  # of the session before these were received


def pin(name: str, *, version: int | None = None, newer_than: int | None = None, wait: float = 60.0) -> Pin:
    """Open a version of published arrays, so that it exists until the pin is released.

    For example, an evaluation compares each version with the best one::

        best = atoll.pin("policy")
        ...
        score(best.read(sharding).tree)
        best.release()

    A version that newer ones have replaced, or that was removed, remains as long as a script has pinned it. If the
    version belongs to another tenant, the pin is released 300 seconds after that.

    Args:
      name: the name, or `tenant/name` for arrays of another tenant.
      version: the number of the version. By default, it is the newest one.
      newer_than: wait for a version with a larger number than this.
      wait: seconds to wait for the version.

    Raises:
      StatusError: there is no such version within `wait` seconds, a part of it is lost, or access is not permitted. The
        message names what is missing.
      BackendError: JAX does not run on Atoll in this process.
    """
    return open_pin(name, version, newer_than, wait)


def open_pin(name: str, version: int | None, newer_than: int | None, wait: float, is_read_at_once: bool = False) -> Pin:
    """Open a version: see `pin`. `is_read_at_once`: the script reads it now, and only once."""
    client = cluster_client()
    number = -1 if version is None else version_number(name, version)
    after = 0 if newer_than is None else min(max(0, operator.index(newer_than)), _MAX_NUMBER)
    reply, opened = open_version(client, check_name(name), number, after, wait)
    return Pin(client, name, opened, reply, is_read_at_once)


class Pin:
    """A version of published arrays that exists until the pin is released: see `pin`. Also a context manager.

    Attributes:
      number: the number of the version.
    """

    def __init__(self, client: Any, name: str, opened: OpenedArrays, reply: Any, is_read_at_once: bool) -> None:
        self.number = opened.version
        self._client = client
        self._name = name
        self._opened = opened
        self._is_read_at_once = is_read_at_once
        self._reply = reply  # the version is closed when this is destructed

    def release(self) -> None:
        """Let the version end if nothing else needs it. Further calls have no effect."""
        self._reply = None

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @status_errors()
    def read(
        self,
        shardings: Any = None,
        *,
        dtype: Any = None,
        like: Any = None,
        verify: bool = False,
        reuse: Version | None = None,
    ) -> Version:
        """Return the version on the devices of this script. The arguments and the errors are those of `subscribe`."""
        import jax

        from atoll.client import array_packing
        from atoll.client import published_trees as trees
        from atoll.client.array_conversions import converted

        name, opened = self._name, self._opened
        if self._reply is None:
            raise StatusError(Code.FAILED_PRECONDITION, f"the pin of version {self.number} of {name} was released")
        form = trees.form_of(name, opened)
        opened, sums = trees.divided(name, opened, form)
        if verify and not sums:
            text = f"version {self.number} of {name} has no checksums: publish it with checksums=True"
            raise StatusError(Code.FAILED_PRECONDITION, text)
        packs = trees.packs_of(name, opened, form)
        tree, numbers = trees.numbered_leaves(name, opened, form, packs, like)
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = iter(trees.shardings_of(tree, numbers, first if shardings is None else shardings))
        parts = [list(itertools.islice(wanted, trees.leaf_count(pack))) for pack in packs]
        trees.check_shardings(name, opened, packs, parts)
        places = [
            part[0] if pack is None else array_packing.target(pack, part[0])
            for pack, part in zip(packs, parts, strict=True)
        ]
        dtype = None if dtype is None else jax.numpy.dtype(dtype)
        contents = trees.contents_of(opened, form)
        losses = self._losses() if any(contents) else 0
        known = reuse._contents if reuse is not None and reuse._losses == losses else {}  # others may have been lost
        left = {content: list(arrays) for content, arrays in known.items()}  # each is a leaf once, and may be donated
        have: dict[int, Any] = {}
        for number, content in enumerate(contents):
            for position, array in enumerate(left.get(content, ())):
                if self._fits(array, opened.arrays[number], places[number], dtype, verify):
                    have[number] = left[content].pop(position)
                    break
        arrays = self._verified(opened, form, places, sums, have) if verify else self._read(opened.arrays, places, have)
        unpacked = [
            [array] if pack is None else array_packing.unpack(pack, array, part)
            for array, pack, part in zip(arrays, packs, parts, strict=True)
        ]
        structure = jax.tree.structure(tree)
        jax.block_until_ready(arrays)  # the script has continued while they were on their way
        firsts = itertools.accumulate(map(len, unpacked), initial=0)
        arrays = list(itertools.chain.from_iterable(unpacked))
        if dtype is not None:
            arrays = converted(arrays, dtype)
        received: dict[int, list[Any]] = {}
        for first, content in zip(firsts, contents, strict=False):
            if content:
                received.setdefault(content, []).append(arrays[first])
        whole = jax.tree.unflatten(structure, [arrays[number] for number in numbers])
        return Version(opened.version, whole, received, losses)

    def _losses(self) -> int:
        """Return the number of islands that this session has lost so far."""
        if self._is_read_at_once:
            return self._opened.losses
        return msgspec.json.decode(ask(self._client, IslandsQuestion()), type=decodable(DevicesAway)).losses

    def _fits(self, array: Any, published: VersionArray, place: Any, dtype: Any, verify: bool) -> bool:
        """Return whether an array with the content of a published one can be a part of the result."""
        import jax

        own = jax.numpy.dtype(published.dtype)
        wanted = own if dtype is None or not jax.numpy.issubdtype(own, jax.numpy.floating) else dtype
        is_comparable = wanted == own or not verify
        is_alike = (array.shape, array.dtype, array.sharding) == (published.shape, wanted, place)
        return not array.is_deleted() and is_alike and is_comparable

    def _verified(
        self,
        opened: OpenedArrays,
        form: TreeForm,
        places: Sequence[Any],
        sums: Sequence[VersionArray],
        have: Mapping[int, Any],
    ) -> list[Any]:
        """Read the arrays with these shardings, and compare all with their checksums. Raise DATA_LOSS.

        The source may be the copy of another script. If it is wrong, the arrays are read once more, from the version.
        """
        try:
            return self._compared(opened, form, places, sums, have, is_original=False)
        except StatusError as error:
            problem = error.status.message
        arrays = self._compared(opened, form, places, sums, {}, is_original=True)
        warnings.warn(f"{problem}; the arrays were read again, from the devices of the version", stacklevel=5)
        return arrays

    def _compared(
        self,
        opened: OpenedArrays,
        form: TreeForm,
        places: Sequence[Any],
        sums: Sequence[VersionArray],
        have: Mapping[int, Any],
        is_original: bool,
    ) -> list[Any]:
        import jax

        from atoll.client import published_trees

        beside = jax.sharding.SingleDeviceSharding(min(places[0].device_set, key=lambda device: device.id))
        arrays = self._read(opened.arrays, places, have, is_original)
        # A request of their own: later subscribers get arrays from this script, which does not keep the checksums.
        read_sums = self._submit(len(places), sums, [beside] * len(sums), is_original)
        published_trees.check(self._name, opened, form, *jax.block_until_ready((arrays, read_sums)))
        return arrays

    def _read(
        self,
        arrays: Sequence[VersionArray],
        places: Sequence[Any],
        have: Mapping[int, Any],
        is_original: bool = False,
    ) -> list[Any]:
        """Read the arrays with these shardings, except those that this script has."""
        import jax

        from atoll.client import array_contents

        if not have:
            return self._submit(0, arrays, places, is_original)
        found = [have.get(number) for number in range(len(arrays))]
        sizes = [math.prod(each.shape) * jax.numpy.dtype(each.dtype).itemsize for each in arrays]
        for some in array_contents.reads(sizes, have):
            part = slice(some.start, some.stop)
            found[part] = self._submit(some.start, arrays[part], places[part], is_original)
        return found

    def _submit(
        self, first: int, arrays: Sequence[VersionArray], places: Sequence[Any], is_original: bool = False
    ) -> list[Any]:
        """Read arrays from number `first` on with these shardings."""
        import jax

        mesh = jax.sharding.get_abstract_mesh()  # the types of arrays without a mesh depend on it
        types = tuple([(each.shape, each.dtype) for each in arrays])
        read, reader = (self._client, types, tuple(places), first, is_original, mesh), self._opened.reader
        return _reading(*read)(reader) if reader <= MAX_LAUNCH_ID else _load_reading(*read, reader)(0)


def _load_reading(
    client: Any,
    types: Sequence[tuple[tuple[int, ...], str]],
    shardings: Sequence[Any],
    first: int,
    is_original: bool,
    mesh: Any,
    reader: int = READER_OF_RUN,
) -> Callable[[int], list[Any]]:
    """Return a function of a reader that returns arrays of its version, with these shapes, dtypes and shardings.

    `mesh` is the script's mesh.
    """
    import jax

    from atoll.client import jax_internals as internals
    from atoll.programs.values import array_spec

    avals = [jax.core.ShapedArray(shape, jax.numpy.dtype(dtype)) for shape, dtype in types]
    targets = tuple(array_spec(aval, each) for aval, each in zip(avals, shardings, strict=True))
    handlers = [internals.result_handler(aval, each, True) for aval, each in zip(avals, shardings, strict=True)]
    execute = submit(client, write_request(ReadArrays(targets, first, is_original, reader))).execute_sharded

    def run(number: int) -> list[Any]:
        arrays: list[Any] = execute([], launch_id=number).consume_with_handlers(handlers)
        return arrays

    return run


# JAX's client waits for replies to the load and to the first run of an executable, and for no reply to further runs.
_reading = client_cache(64)(_load_reading)


def cluster_client() -> Any:
    """Return the JAX client of the cluster. Raise BackendError if JAX does not run on Atoll."""
    import jax

    client = jax.local_devices()[0].client
    if not is_atoll(client):
        raise BackendError(
            "JAX does not run on Atoll in this process: start it with JAX_PLATFORMS=atoll, or call atoll.connect()"
        )
    return client


def check_name(name: str) -> str:
    """Return a name, or `tenant/name`. Raise StatusError if it is invalid."""
    owner, separator, last = name.rpartition(SEPARATOR)
    check_array_name(last)
    if separator:
        check_array_name(owner)
    return name


def version_number(name: str, version: Any) -> int:
    """Return the number of a version as an int. Raise StatusError if no version can have it."""
    number = operator.index(version)
    if not 1 <= number <= _MAX_NUMBER:
        raise invalid(f"versions are numbered from 1: {name} has no version {number}")
    return number


@status_errors()
def open_version(
    client: Any, name: str, version: int, newer_than: int, wait: float, in_files: bool = False
) -> tuple[Any, OpenedArrays]:
    """Return the reply, which keeps the version open, and its content. Raise StatusError.

    With `in_files`, wait until the version is in files, and do not open it.
    """
    until = time.monotonic() + wait
    while True:
        left = max(0.0, until - time.monotonic())
        request = OpenArrays(name, version, newer_than, min(left, _POLL_SECONDS), in_files)
        reply = submit(client, write_request(request))
        opened = msgspec.msgpack.decode(bytes(reply.fingerprint), type=decodable(OpenedArrays))
        if opened.status.code != Code.DEADLINE_EXCEEDED or left <= _POLL_SECONDS:
            _raise_if_error(opened.status)
            return reply, opened


def _raise_if_error(status: Status) -> None:
    """Raise StatusError. If the version is missing on an embedded cluster, name what lets scripts share one."""
    if status.code == Code.DEADLINE_EXCEEDED and is_embedded():
        hint = (
            "This script runs on its own embedded cluster. If another script publishes the version, start a cluster "
            "with `atoll up`, and set ATOLL_ADDRESS for both scripts"
        )
        raise StatusError(Code.DEADLINE_EXCEEDED, f"{status.message}. {hint}", status.payloads)
    status.raise_if_error()
