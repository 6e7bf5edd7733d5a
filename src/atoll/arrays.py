"""Named, versioned arrays: `publish`, `subscribe` and `pin` exchange trees of arrays between scripts on one cluster.

A published version consists of arrays on the devices of the script that published it. Its bytes do not go through the
script. A subscriber gets copies on its own devices, with its own shardings.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atoll.cluster.array_names import SEPARATOR, check_array_name
from atoll.errors import BackendError, Code, StatusError, status_of
from atoll.protocol.messages import MOST_PATH, MOST_PUBLISHED, MOST_STRUCTURE
from atoll.protocol.submission import Staging, encode
from atoll.protocol.tree_forms import Pack, TreeForm
from atoll.protocol.version_requests import (
    NumberedVersion,
    OpenArrays,
    OpenedVersion,
    PublishArrays,
    ReadArrays,
    write_request,
)
from atoll.wire.framing import NO_MESSAGE

# A request waits at most this long at the controller. `subscribe` repeats it, so that an interrupt ends it.
_POLL_SECONDS = 2.0
# Names whose arrays this script donates after it has published them.
_donated: set[str] = set()
_DICT, _LIST, _TUPLE = "dict", "list", "tuple"


@dataclass(frozen=True)
class Version:
    """A version of published arrays, as `subscribe` returns it.

    Attributes:
      number: its number. Versions of a name are numbered from 1.
      tree: the arrays, in a tree of the same form as the published one.
    """

    number: int
    tree: Any


def publish(name: str, tree: Any, *, keep: int = 2, replicas: int = 1) -> int:
    """Publish a tree of arrays under a name, and return the number of this version.

    For example, a trainer publishes its parameters after every step::

        params, opt_state = train_step(params, opt_state, batch)
        version = atoll.publish("policy", params)

    The call returns when the controller has numbered the version. It does not wait for the arrays. The version becomes
    visible at once, when all of its arrays are computed. If one of them fails, no part of the version is visible.

    The script may donate or delete the arrays afterwards. The version shares their memory. If the script donates them
    while the version exists, the devices copy them first. Once a script has donated arrays of a name, `publish` copies
    the arrays of later versions at once, while the script continues, so that the next donation does not wait.

    A version outlives the script. It exists while it is one of the newest `keep` versions of its name, or while a
    script has opened it.

    Args:
      name: at most 128 letters, digits, `_`, `-` and `.`. It belongs to the tenant of the script.
      tree: arrays in dicts, lists and tuples. For other types of nodes, subscribers need the argument `like`. Bytes,
        such as the state of an iterator of `atoll.data`, become an array of uint8.
      keep: number of versions to keep, at most 64.
      replicas: number of islands of which each has all arrays, at most 8. With 2, the devices copy the version to
        another island when it is complete, and it survives the loss of one island.

    Raises:
      StatusError: the name is invalid or not permitted, or there are too many versions.
      TypeError: a leaf is not an array of numbers.
      BackendError: JAX does not run on Atoll in this process.
    """
    import jax

    from atoll.client.plugin_programs import staging, submit

    check_array_name(name)
    client = _client()
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    if not paths_and_leaves:
        raise StatusError(Code.INVALID_ARGUMENT, f"the tree to publish as {name} has no arrays")
    paths = [jax.tree_util.keystr(path) or "." for path, _ in paths_and_leaves]
    for path in paths:
        if len(path) > MOST_PATH // 2:
            raise StatusError(Code.INVALID_ARGUMENT, f"the path {path[:100]}... of an array is too long")
    known: set[Any] = set()
    leaves = [_as_array(leaf, path, client, known) for path, (_, leaf) in zip(paths, paths_and_leaves, strict=True)]
    arrays, structure = _arrays_to_publish(tree, leaves, paths, copies=name in _donated)
    if len(arrays) > MOST_PUBLISHED:
        text = f"{name} has {len(arrays)} arrays that are not small: a version can have at most {MOST_PUBLISHED}"
        raise StatusError(Code.INVALID_ARGUMENT, text)
    request = PublishArrays(name, keep, tuple(each.path for each in arrays), structure, replicas)
    stages = {each: _stage(client, each) for each in dict.fromkeys(array.devices for array in arrays)}
    with staging:
        try:
            for each, some in itertools.groupby(arrays, key=lambda array: array.devices):
                stages[each]([array.value for array in some])
            reply = submit(client, write_request(request))
        except BaseException:  # an interrupt, too
            with suppress(jax.errors.JaxRuntimeError):
                submit(client, write_request(PublishArrays(name, keep, ())))
            raise
    numbered = msgspec.msgpack.decode(bytes(reply.fingerprint), type=NumberedVersion)
    numbered.status.raise_if_error()
    if numbered.donates:
        _donated.add(name)
    return numbered.version


def subscribe(
    name: str,
    shardings: Any = None,
    *,
    version: int | None = None,
    newer_than: int | None = None,
    wait: float = 60.0,
    dtype: Any = None,
    like: Any = None,
) -> Version:
    """Return one whole version of published arrays, on the devices of this script.

    For example, a rollout worker waits for the next parameters::

        policy = atoll.subscribe("policy", NamedSharding(mesh, P()), newer_than=policy.number)
        tokens = generate(policy.tree, prompts)

    The devices of the publisher send the arrays to the devices of this script, which may belong to another mesh and
    another island. All arrays are of the same version.

    Args:
      name: the name, or `tenant/name` for arrays of another tenant.
      shardings: a sharding for all arrays, or a tree of shardings, which may be a prefix of the tree of arrays. By
        default, all arrays are on the first device.
      version: the number of the version. By default, it is the newest one.
      newer_than: wait for a version with a larger number than this.
      wait: seconds to wait for the version.
      dtype: a dtype to which all arrays of real numbers are converted after the transfer.
      like: a tree of the same form as the published one, whose nodes are used for the result.

    Raises:
      StatusError: there is no such version within `wait` seconds, a part of it is lost, or access is not permitted. The
        message names what is missing.
      ValueError: the tree of shardings or `like` does not fit the published tree.
      BackendError: JAX does not run on Atoll in this process.
    """
    with pin(name, version=version, newer_than=newer_than, wait=wait) as pinned:
        return pinned.read(shardings, dtype=dtype, like=like)


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
    client = _client()
    owner, separator, last = name.rpartition(SEPARATOR)
    check_array_name(last)
    if separator:
        check_array_name(owner)
    reply, opened = _open(client, name, -1 if version is None else version, newer_than or 0, wait)
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

    def read(self, shardings: Any = None, *, dtype: Any = None, like: Any = None) -> Version:
        """Return the version on the devices of this script. The arguments and the errors are those of `subscribe`."""
        import jax

        from atoll.client import array_packing
        from atoll.client import jax_internals as internals
        from atoll.client.plugin_programs import submit
        from atoll.programs.values import array_spec

        name, opened = self._name, self._opened
        if self._reply is None:
            raise StatusError(Code.FAILED_PRECONDITION, f"the pin of version {self.number} of {name} was released")
        form = _form(name, opened)
        packs = _packs_of(name, opened, form)
        tree = _numbered_tree(name, opened, form, packs, like)
        if shardings is None:
            shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        chosen: list[Any] = [None] * sum(map(_leaves, packs))
        _fill(tree, shardings, chosen)
        wanted = iter(chosen)
        parts = [list(itertools.islice(wanted, _leaves(pack))) for pack in packs]
        places = [
            part[0] if pack is None else array_packing.target(pack, part[0])
            for pack, part in zip(packs, parts, strict=True)
        ]
        avals = [jax.core.ShapedArray(each.shape, jax.numpy.dtype(each.dtype)) for each in opened.arrays]
        targets = tuple(array_spec(aval, place) for aval, place in zip(avals, places, strict=True))
        handlers = [internals.result_handler(aval, place, True) for aval, place in zip(avals, places, strict=True)]
        try:
            request = write_request(ReadArrays(opened.reader, targets))
            arrays = submit(self._client, request).execute_sharded([]).consume_with_handlers(handlers)
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            status = status_of(error)
            raise StatusError(Code(status.code), status.message, status.payloads) from error
        unpacked = [
            [array] if pack is None else array_packing.unpack(pack, array, part)
            for array, pack, part in zip(arrays, packs, parts, strict=True)
        ]
        arrays = list(itertools.chain.from_iterable(unpacked))
        if dtype is not None:
            arrays = _converted(arrays, jax.numpy.dtype(dtype))
        return Version(opened.version, jax.tree.map(lambda position: arrays[position], tree))


def _client() -> Any:
    """Return the JAX client of the cluster. Raise BackendError if JAX does not run on Atoll."""
    import jax

    from atoll.client.plugin_programs import is_atoll

    client = jax.local_devices()[0].client
    if not is_atoll(client):
        raise BackendError(
            "JAX does not run on Atoll in this process: start it with JAX_PLATFORMS=atoll, or call atoll.connect()"
        )
    return client


def _as_array(leaf: Any, path: str, client: Any, known: set[Any]) -> Any:
    """Return the leaf as an array on the cluster. `known` collects the shardings and dtypes that are valid."""
    import jax

    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"{path} is traced: call atoll.publish outside jit")
    if not isinstance(leaf, jax.Array):
        leaf = jax.device_put(np.frombuffer(leaf, np.uint8) if isinstance(leaf, bytes) else leaf)
    kind = leaf.sharding, leaf.dtype
    if kind not in known:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{path} has the dtype {leaf.dtype}: publish the numbers, such as jax.random.key_data(key)")
        if next(iter(leaf.sharding.device_set)).client is not client:
            raise TypeError(f"{path} is on devices of another backend: put it onto a device of the cluster")
        known.add(kind)
    if leaf.is_deleted():
        raise TypeError(f"{path} has been deleted or donated")
    return leaf


@lru_cache(maxsize=256)
def _stage(client: Any, devices: tuple[int, ...]) -> Callable[[Iterable[Any]], Any]:
    from atoll.client.plugin_programs import submit

    execute: Callable[[Iterable[Any]], Any] = submit(client, encode(Staging(devices))).execute_sharded
    return execute


def _open(client: Any, name: str, version: int, newer_than: int, wait: float) -> tuple[Any, OpenedVersion]:
    """Return the reply, which keeps the version open, and its content. Raise StatusError."""
    from atoll.client.plugin_programs import submit

    until = time.monotonic() + wait
    while True:
        left = max(0.0, until - time.monotonic())
        reply = submit(client, write_request(OpenArrays(name, version, newer_than, min(left, _POLL_SECONDS))))
        opened = msgspec.msgpack.decode(bytes(reply.fingerprint), type=OpenedVersion)
        if opened.status.code != Code.DEADLINE_EXCEEDED or left <= _POLL_SECONDS:
            opened.status.raise_if_error()
            return reply, opened


# ---- trees


class _Published(NamedTuple):
    """An array of a request: a leaf of the tree, or a pack of several."""

    devices: tuple[int, ...]
    value: Any
    path: str
    pack: Pack | None
    positions: list[int]  # of the leaves in the tree


def _arrays_to_publish(
    tree: Any, leaves: Sequence[Any], paths: Sequence[str], copies: bool
) -> tuple[list[_Published], bytes]:
    """Return the arrays of the request, sorted by devices, and the encoded form of the tree.

    With `copies`, the arrays are copies. Otherwise they are the leaves of the tree, and packs of small leaves.
    """
    from atoll.client import array_packing

    groups = array_packing.groups(leaves)
    arrays = []
    for positions, count in groups:
        value, pack = array_packing.pack(
            [leaves[each] for each in positions], [paths[each] for each in positions], count
        )
        path = f"{paths[positions[0]]} and {len(positions) - 1} more"
        arrays.append(_Published(_devices(value), value, path, pack, positions))
    packed = set(itertools.chain.from_iterable(positions for positions, _ in groups))
    alone = [position for position in range(len(leaves)) if position not in packed]
    values = [leaves[position] for position in alone]
    for position, leaf in zip(alone, array_packing.copied(values) if copies else values, strict=True):
        arrays.append(_Published(_devices(leaf), leaf, paths[position], None, [position]))
    arrays.sort(key=lambda array: array.devices)
    return arrays, _encode_structure(tree, arrays)


def _devices(array: Any) -> tuple[int, ...]:
    return tuple(device.id for device in array.sharding._device_assignment)


def _encode_structure(tree: Any, arrays: Sequence[_Published]) -> bytes:
    """Return the form of the tree; b"" if it is too large and not needed."""
    import jax

    order = list(itertools.chain.from_iterable(each.positions for each in arrays))
    numbers = [0] * len(order)
    for number, position in enumerate(order):
        numbers[position] = number
    packs = {number: each.pack for number, each in enumerate(arrays) if each.pack is not None}
    try:
        plain = _plain(jax.tree.unflatten(jax.tree.structure(tree), numbers))
    except TypeError:
        plain = None
    for form in (TreeForm(plain, packs), TreeForm(None, packs)):
        content = msgspec.msgpack.encode(form)
        if len(content) <= MOST_STRUCTURE:
            return content
    text = f"the paths of {len(order)} arrays have more than {MOST_STRUCTURE >> 20} MiB: publish fewer arrays at once"
    raise StatusError(Code.INVALID_ARGUMENT, text)


def _plain(node: Any) -> Any:
    """Return a node as lists, in which numbers are leaves. Raise TypeError for nodes of other types."""
    kind = type(node)
    if kind is int or node is None:
        return node
    if kind is dict and all(type(key) is str for key in node):
        return [_DICT, {key: _plain(each) for key, each in node.items()}]
    if kind is list or kind is tuple:
        return [_LIST if kind is list else _TUPLE, [_plain(each) for each in node]]
    raise TypeError


def _form(name: str, opened: OpenedVersion) -> TreeForm:
    """Return the form of the published tree. Raise ValueError if it is not valid, since any script may publish."""
    try:
        form = msgspec.msgpack.decode(opened.structure, type=TreeForm)
    except NO_MESSAGE as error:
        raise ValueError(f"the form of the tree {name} cannot be read: {error}") from None
    return form


def _packs_of(name: str, opened: OpenedVersion, form: TreeForm) -> list[Pack | None]:
    """Return the pack that each array of the version is, or None. Raise ValueError if one cannot be a pack."""
    packs = [form.packs.get(number) for number in range(len(opened.arrays))]
    for array, pack in zip(opened.arrays, packs, strict=True):
        if pack is not None:
            try:
                pack.check(array.shape)
            except ValueError as error:
                raise ValueError(f"{name} has an invalid form: {error}") from None
    return packs


def _leaves(pack: Pack | None) -> int:
    return 1 if pack is None else len(pack.paths)


def _numbered_tree(name: str, opened: OpenedVersion, form: TreeForm, packs: list[Pack | None], like: Any) -> Any:
    """Return the published tree with the numbers of leaves. Raise ValueError if the form is unknown."""
    import jax

    if like is not None:
        leaves = itertools.chain.from_iterable(
            [array.path] if pack is None else pack.paths for array, pack in zip(opened.arrays, packs, strict=True)
        )
        numbers = {path: number for number, path in enumerate(leaves)}
        paths, definition = jax.tree_util.tree_flatten_with_path(like)
        names = [jax.tree_util.keystr(path) or "." for path, _ in paths]
        if set(names) != set(numbers):
            missing, more = sorted(set(numbers) - set(names))[:5], sorted(set(names) - set(numbers))[:5]
            raise ValueError(f"`like` does not fit {name}: it lacks {missing} and has {more} besides")
        return jax.tree.unflatten(definition, [numbers[each] for each in names])
    if form.tree is None:
        raise ValueError(f"{name} has nodes that are not dicts, lists or tuples: pass a tree of its form as `like`")
    try:
        tree = _unplain(form.tree)
        found = jax.tree.leaves(tree)
    except (ValueError, TypeError, AttributeError, RecursionError):
        found = []
    if sorted(found) != list(range(sum(map(_leaves, packs)))):
        raise ValueError(f"the form of the tree {name} cannot be read: pass a tree of its form as `like`")
    return tree


def _unplain(node: Any) -> Any:
    if type(node) is int or node is None:
        return node
    kind, content = node
    if kind == _DICT:
        return {key: _unplain(each) for key, each in content.items()}
    each = [_unplain(each) for each in content]
    return tuple(each) if kind == _TUPLE else each


def _fill(tree: Any, shardings: Any, chosen: list[Any]) -> None:
    """Set the sharding of each array from a tree of shardings that is a prefix of the tree of numbers."""
    import jax

    def fill(sharding: Any, part: Any) -> None:
        for number in jax.tree.leaves(part):
            chosen[number] = sharding

    is_sharding = lambda each: isinstance(each, jax.sharding.Sharding)  # noqa: E731
    jax.tree.map(fill, shardings, tree, is_leaf=is_sharding)
    if None in chosen:
        raise ValueError("the tree of shardings has no sharding for some arrays")


def _converted(arrays: Sequence[Any], dtype: Any) -> list[Any]:
    """Return the arrays with their real numbers converted, on the same devices."""
    import jax
    import jax.numpy as jnp

    groups: dict[Any, list[int]] = {}
    for position, each in enumerate(arrays):
        if jnp.issubdtype(each.dtype, jnp.floating) and each.dtype != dtype:
            groups.setdefault(tuple(each.sharding._device_assignment), []).append(position)
    result = list(arrays)
    for positions in groups.values():
        some = [arrays[position] for position in positions]
        convert = jax.jit(
            lambda xs: [x.astype(dtype) for x in xs],
            out_shardings=[x.sharding for x in some],
        )
        for position, each in zip(positions, convert(some), strict=True):
            result[position] = each
    return result
