"""Versions of published arrays that a script has opened: `pin`, and `Pin.read`, which also `subscribe` uses."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.cluster.array_names import SEPARATOR, check_array_name
from atoll.errors import BackendError, Code, StatusError, status_of
from atoll.protocol.messages import VersionArray
from atoll.protocol.tree_forms import TreeForm
from atoll.protocol.version_requests import OpenArrays, OpenedVersion, ReadArrays, write_request

# A request waits at most this long at the controller. It is repeated, so that an interrupt ends it.
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Version:
    """A version of published arrays, as `subscribe` returns it.

    Attributes:
      number: its number. Versions of a name are numbered from 1.
      tree: the arrays, in a tree of the same form as the published one.
    """

    number: int
    tree: Any


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
    client = cluster_client()
    reply, opened = open_version(client, check_name(name), -1 if version is None else version, newer_than or 0, wait)
    return Pin(client, name, opened, reply)


class Pin:
    """A version of published arrays that exists until the pin is released: see `pin`. Also a context manager.

    Attributes:
      number: the number of the version.
    """

    def __init__(self, client: Any, name: str, opened: OpenedVersion, reply: Any) -> None:
        self.number = opened.version
        self._client = client
        self._name = name
        self._opened = opened
        self._reply = reply  # the version is closed when this is destructed

    def release(self) -> None:
        """Let the version end if nothing else needs it. Further calls have no effect."""
        self._reply = None

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def read(self, shardings: Any = None, *, dtype: Any = None, like: Any = None, verify: bool = False) -> Version:
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
        tree = trees.numbered_tree(name, opened, form, packs, like)
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        chosen: list[Any] = [None] * sum(map(trees.leaf_count, packs))
        trees.fill_shardings(tree, first if shardings is None else shardings, chosen)
        wanted = iter(chosen)
        parts = [list(itertools.islice(wanted, trees.leaf_count(pack))) for pack in packs]
        places = [
            part[0] if pack is None else array_packing.target(pack, part[0])
            for pack, part in zip(packs, parts, strict=True)
        ]
        try:
            if verify:
                arrays = self._verified(opened, form, places, sums)
            else:
                arrays = jax.block_until_ready(self._submit(0, opened.arrays, places))
        except jax.errors.JaxRuntimeError as error:
            status = status_of(error)
            raise StatusError(Code(status.code), status.message, status.payloads) from error
        unpacked = [
            [array] if pack is None else array_packing.unpack(pack, array, part)
            for array, pack, part in zip(arrays, packs, parts, strict=True)
        ]
        arrays = list(itertools.chain.from_iterable(unpacked))
        if dtype is not None:
            arrays = converted(arrays, jax.numpy.dtype(dtype))
        return Version(opened.version, jax.tree.map(lambda position: arrays[position], tree))

    def _verified(
        self, opened: OpenedVersion, form: TreeForm, places: Sequence[Any], sums: Sequence[VersionArray]
    ) -> list[Any]:
        """Read the arrays with these shardings, and compare them with their checksums. Raise DATA_LOSS.

        The source may be the copy of another script. If it is wrong, the arrays are read once more, from the version.
        """
        try:
            return self._compared(opened, form, places, sums, is_original=False)
        except StatusError as error:
            problem = error.status.message
        arrays = self._compared(opened, form, places, sums, is_original=True)
        warnings.warn(f"{problem}; the arrays were read again, from the devices of the version", stacklevel=4)
        return arrays

    def _compared(
        self,
        opened: OpenedVersion,
        form: TreeForm,
        places: Sequence[Any],
        sums: Sequence[VersionArray],
        is_original: bool,
    ) -> list[Any]:
        import jax

        from atoll.client import published_trees

        beside = jax.sharding.SingleDeviceSharding(min(places[0].device_set, key=lambda device: device.id))
        arrays = self._submit(0, opened.arrays, places, is_original)
        # A request of their own: later subscribers get arrays from this script, which does not keep the checksums.
        read_sums = self._submit(len(places), sums, [beside] * len(sums), is_original)
        published_trees.check(self._name, opened, form, *jax.block_until_ready((arrays, read_sums)))
        return arrays

    def _submit(
        self, first: int, arrays: Sequence[VersionArray], places: Sequence[Any], is_original: bool = False
    ) -> list[Any]:
        """Read arrays from number `first` on with these shardings."""
        import jax

        from atoll.client import jax_internals as internals
        from atoll.client.plugin_programs import submit
        from atoll.programs.values import array_spec

        avals = [jax.core.ShapedArray(each.shape, jax.numpy.dtype(each.dtype)) for each in arrays]
        targets = tuple(array_spec(aval, place) for aval, place in zip(avals, places, strict=True))
        handlers = [internals.result_handler(aval, place, True) for aval, place in zip(avals, places, strict=True)]
        request = write_request(ReadArrays(self._opened.reader, targets, first, is_original))
        found: list[Any] = submit(self._client, request).execute_sharded([]).consume_with_handlers(handlers)
        return found


def cluster_client() -> Any:
    """Return the JAX client of the cluster. Raise BackendError if JAX does not run on Atoll."""
    import jax

    from atoll.client.plugin_programs import is_atoll

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


def open_version(
    client: Any, name: str, version: int, newer_than: int, wait: float, in_files: bool = False
) -> tuple[Any, OpenedVersion]:
    """Return the reply, which keeps the version open, and its content. Raise StatusError.

    With `in_files`, wait until the version is in files, and do not open it.
    """
    from atoll.client.plugin_programs import submit

    until = time.monotonic() + wait
    while True:
        left = max(0.0, until - time.monotonic())
        request = OpenArrays(name, version, newer_than, min(left, _POLL_SECONDS), in_files)
        reply = submit(client, write_request(request))
        opened = msgspec.msgpack.decode(bytes(reply.fingerprint), type=OpenedVersion)
        if opened.status.code != Code.DEADLINE_EXCEEDED or left <= _POLL_SECONDS:
            opened.status.raise_if_error()
            return reply, opened
