"""Named, versioned arrays: `publish` and `subscribe` exchange trees of arrays between scripts on one cluster.

A published version consists of arrays on the devices of the script that published it. Its bytes do not go through the
script. A subscriber gets copies on its own devices, with its own shardings.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from atoll.client.plugin_programs import staging, staging_call, status_errors, submit
from atoll.cluster.array_names import check_array_name
from atoll.decodable import decodable
from atoll.errors import Code, StatusError
from atoll.pins import Version, check_name, cluster_client, open_pin, open_version, version_number
from atoll.protocol.messages import MAX_PATH, MAX_PUBLISHED
from atoll.protocol.version_requests import NumberedVersion, PublishArrays, write_request

if TYPE_CHECKING:
    from atoll.client.published_trees import TreeLayout, TreeOutline

# Larger numbers are not sent. The controller has lower limits.
_MAX_OPTION = (1 << 31) - 1
# Names whose arrays this script donates after it has published them.
_donated: set[str] = set()


@status_errors()
def publish(
    name: str,
    tree: Any,
    *,
    keep: int = 2,
    dtype: Any = None,
    replicas: int = 1,
    spill: str | None = None,
    checksums: bool = False,
) -> int:
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
      tree: arrays in lists, tuples, and dicts with strings as keys. For other types of nodes, subscribers need the
        argument `like`. Bytes, such as the state of an iterator of `atoll.data`, become an array of uint8.
      keep: number of versions to keep, at most 64.
      dtype: a dtype to which the devices convert all arrays of real numbers, such as bfloat16, so that the version
        takes less memory and less time to read.
      replicas: number of islands of which each has all arrays, at most 8. With 2, the devices copy the version to
        another island when it is complete, and it survives the loss of one island.
      spill: "disk" if the devices' hosts write the version to files when it is complete. It then survives the loss of
        its islands, and of the cluster if that has a journal. `atoll.wait_until_stored` waits for the files.
      checksums: also publish checksums of the arrays, which their devices compute. Subscribers can verify them.

    Raises:
      StatusError: the name is invalid or not permitted, there are too many versions, or an island has failed.
      TypeError: a leaf is not an array of numbers.
      BackendError: JAX does not run on Atoll in this process.
    """
    from atoll.client import published_trees

    check_array_name(name)
    keep, replicas = _positive("keep", keep), _positive("replicas", replicas)
    if spill not in (None, "disk"):
        raise StatusError(Code.INVALID_ARGUMENT, f'spill must be "disk" or None, not {spill!r}')
    client = cluster_client()
    outline, leaves = published_trees.outline_of(tree)
    if not leaves:
        raise StatusError(Code.INVALID_ARGUMENT, f"the tree to publish as {name} has no arrays")
    if len(outline.longest) > MAX_PATH // 2:
        raise StatusError(Code.INVALID_ARGUMENT, f"the path {outline.longest[:100]}... of an array is too long")
    leaves = _as_arrays(leaves, outline.paths)
    layout = outline.layout_of(leaves)
    _check_backend(layout.types, outline.paths, client)
    request = PublishArrays(name, keep, (), b"", replicas, spill is not None)
    try:
        reply = _send(client, request, outline, leaves, layout, dtype, checksums)
    except Exception:  # jaxlib has refused a deleted array, if there is one: to look for it takes milliseconds
        _check_alive(leaves, outline.paths)
        raise
    numbered = msgspec.msgpack.decode(bytes(reply.fingerprint), type=decodable(NumberedVersion))
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
    verify: bool = False,
    reuse: Version | None = None,
) -> Version:
    """Return one whole version of published arrays, on the devices of this script.

    For example, a rollout worker waits for the next parameters::

        policy = atoll.subscribe("policy", NamedSharding(mesh, P()), newer_than=policy.number)
        tokens = generate(policy.tree, prompts)

    The devices of the publisher send the arrays to the devices of this script, which may belong to another mesh and
    another island. All arrays are of the same version.

    Args:
      name: the name, or `tenant/name` for arrays of another tenant.
      shardings: a sharding or a device for all arrays, or a tree of shardings and devices, which may be a prefix of the
        tree of arrays. By default, all arrays are on the first device.
      version: the number of the version. By default, it is the newest one.
      newer_than: wait for a version with a larger number than this.
      wait: seconds to wait for the version.
      dtype: a dtype to which all arrays of real numbers are converted after the transfer.
      like: a tree of the same form as the published one, whose nodes are used for the result.
      verify: compare what each device has received with the checksums of the version.
      reuse: a version that this script has received. If the publisher has published the same arrays again, such as
        frozen weights, the result has the arrays of this version, and the devices receive only the other ones. Arrays
        of less than 1 MiB, and those that need another sharding, were donated or were lost, are received again. Leaves
        of the result are always different arrays, so the result can be donated.

    Raises:
      StatusError: there is no such version within `wait` seconds, a part of it is lost, an island of this script has
        failed, access is not permitted, or `verify` is set and arrays differ from their checksums. The message names
        what is missing or has failed, or the devices with wrong bytes.
      ValueError: the tree of shardings or `like` does not fit the published tree.
      BackendError: JAX does not run on Atoll in this process.
    """
    with open_pin(name, version, newer_than, wait, is_read_at_once=True) as pinned:
        return pinned.read(shardings, dtype=dtype, like=like, verify=verify, reuse=reuse)


def wait_until_stored(name: str, version: int, *, timeout: float = 60.0) -> None:
    """Wait until the files of a version that was published with `spill="disk"` are complete.

    The version then survives the loss of its islands, and of the cluster if that has a journal. For example, a trainer
    waits for its last version before it ends::

        version = atoll.publish("policy", params, spill="disk")
        atoll.wait_until_stored("policy", version, timeout=600)

    Args:
      name: the name, or `tenant/name` for arrays of another tenant.
      version: the number of the version.
      timeout: seconds to wait.

    Raises:
      StatusError: the files are not complete within `timeout` seconds, the version was published without
        `spill="disk"`, it failed, is lost or does not exist any more, or access is not permitted. The message names the
        reason, for example that a disk is full.
      BackendError: JAX does not run on Atoll in this process.
    """
    number = version_number(name, version)
    open_version(cluster_client(), check_name(name), number, 0, timeout, in_files=True)


def _positive(what: str, value: Any) -> int:
    """Return an argument as an int. Raise StatusError if it is not positive, or larger than any limit."""
    number = operator.index(value)
    if not 1 <= number <= _MAX_OPTION:
        raise StatusError(Code.INVALID_ARGUMENT, f"{what} must be from 1 to {_MAX_OPTION}, not {number}")
    return number


def _as_arrays(leaves: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """Return the leaves as arrays. Raise TypeError for a leaf that is traced, or not an array of numbers."""
    from atoll.client import jax_internals as internals

    array = internals.Array
    if set(map(type, leaves)) == {array}:
        return list(leaves)
    return [leaf if type(leaf) is array else _as_array(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]


def _as_array(leaf: Any, path: str) -> Any:
    import jax

    path = "the array" if path == "." else path
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"{path} is traced: call atoll.publish outside jit")
    if not isinstance(leaf, jax.Array):
        try:
            leaf = jax.device_put(np.frombuffer(leaf, np.uint8) if isinstance(leaf, bytes) else leaf)
        except TypeError:
            raise TypeError(f"{path} is of type {type(leaf).__name__}: publish arrays, numbers and bytes") from None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{path} has the dtype {leaf.dtype}: publish the numbers, such as jax.random.key_data(key)")
    return leaf


def _send(
    client: Any,
    request: PublishArrays,
    outline: TreeOutline,
    leaves: Sequence[Any],
    layout: TreeLayout,
    dtype: Any,
    checksums: bool,
) -> Any:
    """Send the request with these leaves. Return the reply."""
    import jax

    from atoll.client import published_trees
    from atoll.client.array_contents import contents_of
    from atoll.client.array_conversions import converted

    name = request.name
    dtype = None if dtype is None else jax.numpy.dtype(dtype)
    contents = contents_of(leaves, layout.types, dtype)
    if dtype is not None:
        leaves = converted(leaves, dtype)
        layout = outline.layout_of(leaves)
    copies = name in _donated and dtype is None  # converted arrays are copies already
    arrays, structure = published_trees.arrays_to_publish(outline, leaves, layout, contents, copies, checksums)
    if len(arrays) > MAX_PUBLISHED:
        text = f"{name} has {len(arrays)} arrays that are not small: a version can have at most {MAX_PUBLISHED}"
        raise StatusError(Code.INVALID_ARGUMENT, text)
    paths = tuple([each.place.path for each in arrays])
    if len(set(paths)) < len(paths):
        raise StatusError(Code.INVALID_ARGUMENT, f"two arrays of the tree to publish as {name} have the same path")
    request = msgspec.structs.replace(request, paths=paths, structure=structure)
    stages = {each: staging_call(client, each) for each in dict.fromkeys(array.place.devices for array in arrays)}
    with staging:
        try:
            for each, some in itertools.groupby(arrays, key=lambda array: array.place.devices):
                stages[each]([array.value for array in some])
            return submit(client, write_request(request))
        except BaseException:  # an interrupt, too
            with suppress(jax.errors.JaxRuntimeError):
                submit(client, write_request(PublishArrays(name, request.keep, ())))
            raise


def _check_backend(types: Mapping[tuple[Any, Any], Sequence[int]], paths: Sequence[str], client: Any) -> None:
    """Raise TypeError if an array is not on the cluster."""
    for (sharding, _), positions in types.items():
        if next(iter(sharding.device_set)).client is not client:
            path = paths[positions[0]]
            raise TypeError(f"{path} is on devices of another backend: put it onto a device of the cluster")


def _check_alive(arrays: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise TypeError if an array has been deleted."""
    from atoll.client import jax_internals as internals

    if any(map(internals.Array.is_deleted, arrays)):
        path = next(path for path, each in zip(paths, arrays, strict=True) if each.is_deleted())
        raise TypeError(f"{path} has been deleted or donated")
