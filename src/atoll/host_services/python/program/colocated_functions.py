"""Functions of colocated Python in the process that runs them, and all uses of JAX in this process.

`jax.experimental.colocated_python` pickles devices by the client's ids. In this process the devices are its own, so
this module replaces JAX's table of devices and the three functions that pickle devices.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import distributed, tree_util, xla_bridge
from jax._src.lib import _jax
from jax.experimental.colocated_python import obj_backend, serialization

from atoll.cluster.sandbox.grants import Sandbox
from atoll.host_services.python.program.stored_arrays import reading, writing
from atoll.protocol.messages import python_messages as m

# Timeout after which the processes of a program detect that one of them has ended. They then end as well.
_HEARTBEAT_SECONDS = 10
_JOIN_SECONDS = 100


def open_functions(options: m.PythonOptions) -> Functions:
    """Start JAX. On several hosts, wait until the processes on the program's other hosts start it."""
    adopt(options.settings)
    _parse_flags()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", len(options.devices[options.rank]))
    if options.coordinator_address:
        jax.distributed.initialize(
            options.coordinator_address,
            len(options.devices),
            options.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            coordinator_bind_address=options.coordinator_address,
        )
        _compute_at(options.hostname)
    devices: dict[int, jax.Device] = {}
    for host, ids in enumerate(options.devices):
        here = sorted((each for each in jax.devices() if each.process_index == host), key=lambda each: each.id)
        devices.update(zip(ids, here, strict=True))
    return Functions(devices, options.devices[options.rank], options.sandbox)


def _parse_flags() -> None:
    """Give absl's flags their defaults, as in a script that runs by `absl.app.run`. Grain's processes read flags."""
    with contextlib.suppress(ImportError):
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()


def _compute_at(hostname: str) -> None:
    """Receive data of collectives from the program's other hosts at `hostname`."""
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=hostname)
    xla_bridge.register_backend_factory(
        "cpu", partial(xla_bridge.make_cpu_client, collectives), priority=0, fail_quietly=False
    )


class LostObjectError(RuntimeError):
    """An object was lost with the process that held it."""


class Functions:
    """Loads functions of colocated Python.

    `devices` are the devices of all the program's processes by the client's ids. `local` are the ids of this process.
    """

    def __init__(self, devices: dict[int, jax.Device], local: Sequence[int], sandbox: Sandbox) -> None:
        self._local = local
        self._sandbox = sandbox
        self._id_of = {device.id: number for number, device in devices.items()}
        private: Any = serialization
        private._get_cpu_device_map = lambda: devices
        common = private._make_reduce_func_with_common_obj
        private._reduce_mesh = common(self._reduce_mesh)
        private._reduce_device_list = common(self._reduce_device_list)
        private._reduce_single_device_sharding = common(self._reduce_single_device_sharding)
        store: Any = obj_backend.SINGLETON_OBJECT_STORE
        self._get_or_create = store.get_or_create
        store.get_or_create = self._object
        self._reloaded = threading.local()  # whether this thread runs a function that an earlier process had loaded

    def _reduce_mesh(self, mesh: Any) -> Any:
        ids = np.vectorize(lambda device: self._id_of[device.id], otypes=[int])(mesh.devices)
        return serialization._unreduce_mesh, (ids, mesh.axis_names, mesh.axis_types)

    def _reduce_device_list(self, devices: Any) -> Any:
        return serialization._unreduce_device_list, ([self._id_of[device.id] for device in devices],)

    def _reduce_single_device_sharding(self, sharding: Any) -> Any:
        (device,) = sharding.device_set
        return serialization._unreduce_single_device_sharding, (self._id_of[device.id], sharding.memory_kind)

    def _object(self, uid: int, initializer: Callable[[], Any]) -> Any:
        """Get or create an object. Raise LostObjectError if an earlier process may have had it."""

        def make() -> Any:
            if getattr(self._reloaded, "value", False):
                host = f"host {jax.process_index()} of {jax.process_count()}"
                raise LostObjectError(f"the object was lost when its process on {host} ended: create a new object")
            return initializer()

        return self._get_or_create(uid, make)

    def release_memory(self) -> None:
        """Make jaxlib release the memory of deleted arrays now, rather than at its next call."""
        _jax.collect_garbage()

    def load(self, source: m.PythonSource, again: bool) -> Callable[[m.Call, Any], Any]:
        """Return a function that runs a call, from an iterable of arguments' local shards to results' local shards.

        `again` says that an earlier process of the session had loaded the function.
        """
        match source:
            case m.WriteArrays():
                return writing(source, self._local, self._sandbox)
            case m.ReadArrays():
                return reading(source, self._local, self._sandbox)
        adopt(source.settings)  # the options of the start may lack settings
        function, in_tree, in_specs, out_tree, out_specs, _ = serialization._deserialize(source.text)

        def run(call: m.Call, arguments: Iterable[Sequence[Any]]) -> Any:
            given = {argument.position: shards for argument, shards in zip(call.arguments, arguments, strict=True)}
            leaves = [_array(spec, given.get(i, ())) for i, spec in enumerate(in_specs)]
            args, kwargs = tree_util.tree_unflatten(in_tree, leaves)
            self._reloaded.value = again
            try:
                results, tree = tree_util.tree_flatten(function(*args, **kwargs))
            finally:
                self._reloaded.value = False
            if tree != out_tree:
                raise TypeError(f"{source.name} returned {tree}, but its specialization declares {out_tree}")
            return [_shards(source.name, results[i], out_specs[i]) for i in call.results]

        return run


def adopt(settings: m.ClientSettings) -> None:
    """Adopt the client's directory and sys.path, as far as they exist on this host, and its configuration of JAX."""
    with contextlib.suppress(OSError):
        if settings.directory:
            os.chdir(settings.directory)
    known = set(sys.path)
    sys.path.extend(
        each for each in settings.path if each not in known and os.path.isabs(each) and os.path.exists(each)
    )
    for name, value in settings.config.items():
        if name in jax.config.values and jax.config.values[name] != value:
            jax.config.update(name, value)


def _local(sharding: Any) -> list[Any]:
    """Return the devices of a sharding that belong to this process, in order."""
    here = jax.process_index()
    return [device for device in sharding._device_assignment if device.process_index == here]


def _array(spec: Any, shards: Sequence[Any]) -> jax.Array:
    arrays = [jax.device_put(shard, device) for shard, device in zip(shards, _local(spec.sharding), strict=True)]
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, arrays, dtype=spec.dtype)


def _shards(name: str, array: Any, spec: Any) -> list[Any]:
    """Return a result's shards on the local devices of its declared sharding. Raise TypeError if it does not match."""
    if not isinstance(array, jax.Array):
        raise TypeError(f"{name} returned {type(array)}: a function of colocated Python must return JAX arrays")
    if (array.shape, array.dtype) != (spec.shape, spec.dtype):
        raise TypeError(
            f"{name} returned {array.dtype}{list(array.shape)}, but its specialization declares "
            f"{spec.dtype}{list(spec.shape)}"
        )
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    found = []
    for device in _local(spec.sharding):
        if device not in by_device:
            raise TypeError(f"{name} returned an array without a shard on {device}, which its specialization declares")
        found.append(np.asarray(by_device[device]))
    return found
