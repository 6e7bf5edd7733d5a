"""This host's XLA devices: starting JAX in a worker, compiling and loading programs, and operations on arrays."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import array as jax_array
from jax._src import compiler, distributed, monitoring
from jax._src.layout import Format, Layout
from jax._src.lib import _jax, _profiler, cpu_sparse, lapack
from jax._src.lib import xla_client as xc
from jax.sharding import SingleDeviceSharding

from atoll.cluster.environment_variables import JAX_PLATFORMS
from atoll.cluster.slice_placement import GPUS
from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram, Description, RenamedTarget
from atoll.devices.device import Assignment, DeviceBackend, LibraryLoader, ProgramLoader, WorldMaker
from atoll.devices.device_kinds import IslandMembership
from atoll.devices.xla import xla_compile_calls, xla_custom_calls, xla_island
from atoll.devices.xla.batch_threads import BatchThreads, start_batch_threads
from atoll.devices.xla.client_callbacks import stubs
from atoll.devices.xla.compiled_programs import (
    CompiledPrograms,
    Programs,
    check_in_use,
    compiling_for,
    open_programs,
    use_programs,
)
from atoll.devices.xla.description import describe
from atoll.devices.xla.executable import Gates, XlaExecutable
from atoll.devices.xla.loop_checks import insert_checks
from atoll.devices.xla.stops import stops_here
from atoll.devices.xla.xla_arrays import UnevenShards, shards_of, stacked_handler, stacked_type
from atoll.devices.xla.xla_compilation import Prepared, Source, check_values, context, load_executable, prepare
from atoll.devices.xla.xla_libraries import XlaLibraries
from atoll.devices.xla.xla_world import XlaWorlds
from atoll.errors import ClusterError, Code, StatusError
from atoll.host_services import host_data
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.python.rendezvous import KeyValues
from atoll.ir.plan import LocalArray
from atoll.protocol.messages import DeviceInfo
from atoll.protocol.profiles import Recording
from atoll.transfers.dtypes import numpy_dtype

# Attributes that JAX, Pallas and libraries read to choose kernels for a device.
_ATTRIBUTES = ("compute_capability", "core_count", "device_vendor")
# Modules that register custom calls of recurrent networks and Pallas on GPUs.
_GPU_CUSTOM_CALLS = ("jax._src.lib.gpu_rnn", "jax._src.lib.gpu_triton", "jax._src.lib.mosaic_gpu")
_SMALL_BYTES = 64 << 10
_ZERO_COPY: Any = xc.HostBufferSemantics.ZERO_COPY
_ONLY_DURING_CALL: Any = xc.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
_cache_hit = threading.local()


def _note_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _cache_hit.seen = True


def _register_custom_calls(platform: str) -> None:
    """Register custom calls that JAX otherwise registers only in processes that import certain modules."""
    for registered in (cpu_sparse, lapack):
        for target_platform, targets in registered.registrations().items():
            for name, handler, version in targets:
                xc.register_custom_call_target(name, handler, platform=target_platform, api_version=version)
    for name in lapack.batch_partitionable_targets():
        xc.register_custom_call_as_batch_partitionable(name)
    for module in _GPU_CUSTOM_CALLS if platform in GPUS else ():
        with contextlib.suppress(ImportError):  # not every GPU plug-in has all of them
            importlib.import_module(module)


def _open_devices() -> tuple[Any, ...]:
    """Start JAX, and return this host's devices. Raise ClusterError if JAX has none of the platform."""
    try:
        return tuple(jax.local_devices())
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has a platform if a plug-in is missing
        platform = JAX_PLATFORMS.text()
        reason = f" ({error})" if str(error) else ""
        raise ClusterError(
            f"JAX {jax.__version__} finds no devices of platform {platform} on this machine{reason}: install JAX for "
            "this platform in the environment of Atoll, check the driver, or choose another --platform"
        ) from error


class XlaBackend:
    """XLA's devices of this host: a `devices.device.DeviceBackend`."""

    # More than 32 can deadlock the thread pool of XLA's CPU client. Clients of other platforms block beyond that.
    max_in_flight = 24
    compiler = "atoll.devices.xla.compiler:XlaCompiler"

    def __init__(self, programs: Programs | None = None) -> None:
        with start_batch_threads():
            self.devices: tuple[Any, ...] = _open_devices()
        processes = xla_island.devices_by_host(jax.devices())
        hosts = distributed.global_state.num_processes or 1
        self._island = processes[:hosts]
        self._elsewhere = processes[hosts][0] if len(processes) > hosts else None  # see `remote_device`
        self.loads_apart = self._elsewhere is not None
        self.key_values: KeyValues | None = xla_island.key_values()
        self.client = self.devices[0].client
        self.platform: str = self.client._raw_platform
        self.platform_version: str = self.client.platform_version
        self.loader: ProgramLoader | None = self
        self._compiled = CompiledPrograms(programs, self.devices)
        # A compiler process belongs to no island, so it has as many devices as the whole island.
        self.compiler_devices = sum(map(len, self._island)) if self.platform == "cpu" else 1
        monitoring.register_event_listener(_note_event)
        xla_compile_calls.register()
        xla_custom_calls.register_address_call()
        _register_custom_calls(self.platform)
        xla_island.keep_compiled_programs()
        self._gates = Gates() if self.platform == "cpu" else None
        self._stops = stops_here(self.platform)
        self._worlds = XlaWorlds(self.client, self.devices)
        self.worlds: WorldMaker | None = self._worlds if self.platform == "cpu" else None
        self.libraries: LibraryLoader | None = XlaLibraries(self.platform)

    def describe(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(
                ordinal,
                device.device_kind,
                self.platform,
                tuple(memory.kind for memory in device.addressable_memories()),
                device.default_memory().kind,
                tuple(getattr(device, "coords", None) or (ordinal, 0, 0)),
                int(getattr(device, "core_on_chip", None) or 0),
                int(device.local_hardware_id if device.local_hardware_id is not None else ordinal),
                int((device.memory_stats() or {}).get("bytes_limit", 0)),
                tuple((name, value) for name in _ATTRIBUTES if (value := getattr(device, name, None)) is not None),
            )
            for ordinal, device in enumerate(self.devices)
        )

    # ---- compiled functions

    def compile(
        self,
        program: bytes,
        options: bytes,
        assignment: Assignment,
        callbacks: Callbacks | None = None,
        tenant: str = "",
        world: int = 0,
        targets: tuple[RenamedTarget, ...] = (),
    ) -> tuple[XlaExecutable, bool, float]:
        """Compile a portable StableHLO artifact. See `DeviceBackend`.

        Raises XLA's errors unchanged, so users see the text that stock JAX shows. Raises MayCrashError.
        """
        started = time.monotonic()
        client, grid = self._client_and_grid(assignment, world, (0, 0))
        with context(len(program)):
            called = (0, ()) if callbacks is None else (len(callbacks), callbacks.channels)
            source = Source(program, options, *called, targets)
            prepared = prepare(source, grid, callbacks)
            self._check_values(prepared, grid.size)
            if tenant and self._stops is not None:
                insert_checks(prepared.module, grid.size)
            _cache_hit.seen = False
            if callbacks is not None:  # the program belongs to one session, so it is not cached
                host_callbacks = stubs(callbacks, prepared.signatures, client)
                loaded = prepared.compile(client, grid.flatten(), host_callbacks)
            else:
                devices = xc.DeviceList(tuple(grid.flatten()))
                with compiling_for(tenant):
                    loaded = compiler.compile_or_get_cached(
                        client, prepared.module, grid, prepared.options, [], devices
                    )
        description = describe(loaded, self._here(grid)[0])
        executable = self._executable(loaded, grid, description, callbacks, world)
        return executable, bool(_cache_hit.seen), time.monotonic() - started

    def compile_over_islands(
        self, request: CompileProgram, callbacks: Callbacks | None, tenant: str
    ) -> tuple[CompiledProgram, bool, float]:
        started = time.monotonic()
        kept = self.find(request, tenant)
        if kept is not None and kept.has_parts:
            return kept, True, time.monotonic() - started
        # XLA's code for CPUs refers to no device, and these devices need not be those that run it.
        count = request.replicas * request.partitions
        grid = np.array([self.devices[0]] * count, dtype=object).reshape(request.replicas, request.partitions)
        with context(len(request.program)):
            source = Source(request.program, request.options, request.callbacks, request.channels, request.targets)
            prepared = prepare(source, grid, callbacks)
            self._check_values(prepared, count)
            if tenant and self._stops is not None:
                insert_checks(prepared.module, count)
            signatures = tuple(prepared.signatures)
            calls = [] if callbacks is None else stubs(callbacks, signatures, self.client)
            loaded = prepared.compile(self.client, tuple(grid.flatten()), calls)
        program = CompiledProgram(loaded.serialize(), describe(loaded, grid.flat[0], grid.shape), signatures)
        self.keep(request, tenant, program)
        return program, False, time.monotonic() - started

    def _check_values(self, prepared: Prepared, devices: int) -> None:
        if self.platform == "cpu":
            check_values(prepared.module, devices)

    def find(self, request: CompileProgram, tenant: str) -> CompiledProgram | None:
        return self._compiled.find(request, tenant)

    def keep(self, request: CompileProgram, tenant: str, program: CompiledProgram) -> None:
        self._compiled.keep(request, tenant, program)

    def load(
        self,
        program: CompiledProgram,
        assignment: Assignment,
        callbacks: Callbacks | None = None,
        world: int = 0,
        ranks: tuple[int, int] = (0, 0),
    ) -> XlaExecutable:
        """Load a program that a compiler process has compiled."""
        if program.description is None or len(program.signatures) != (0 if callbacks is None else len(callbacks)):
            raise StatusError(Code.INTERNAL, "the answer of a compiler process does not match its request")
        client, grid = self._client_and_grid(assignment, world, ranks)
        host_callbacks = [] if callbacks is None else stubs(callbacks, program.signatures, client)
        loaded = load_executable(client, program.executable, grid, host_callbacks)
        is_apart = bool(ranks[1]) and callbacks is None
        if is_apart:
            is_apart = not program.description.crosses([device.process_index for device in grid.flat])
        return self._executable(loaded, grid, program.description, callbacks, world, is_apart)

    def _client_and_grid(self, assignment: Assignment, world: int, ranks: tuple[int, int]) -> tuple[Any, Any]:
        """Return the client of the world, and its devices as [replica][partition].

        Without a world, the hosts of this island have these `ranks` in the assignment, and the remote device takes the
        places of the devices of other islands.
        """
        first, count = (0, 0) if world else ranks
        client, hosts = self._worlds.client_and_hosts(world) if world else (self.client, self._island)

        def device(host: int, ordinal: int) -> Any:
            is_elsewhere = count and not first <= host < first + count
            return self._elsewhere if is_elsewhere else hosts[host - first][ordinal]

        grid = np.array([[device(*each) for each in row] for row in assignment], dtype=object)
        return client, grid

    def _here(self, grid: Any) -> tuple[Any, ...]:
        return tuple(device for device in grid.flatten() if device.client.process_index() == device.process_index)

    def _executable(
        self,
        loaded: Any,
        grid: Any,
        description: Description,
        callbacks: Callbacks | None,
        world: int,
        is_apart: bool = False,
    ) -> XlaExecutable:
        """Return an executable. If it `is_apart`, its devices do not communicate with those of other hosts."""
        here = self._here(grid)
        devices = self._worlds.devices_in(world)
        ordinals = tuple(devices.index(device) for device in here)
        gates = self._gates if callbacks and len(here) == 1 else None
        is_joint = len(here) < grid.size and not is_apart
        return XlaExecutable(loaded, description, here, ordinals, gates, is_joint, world)

    def stop(self, sequence: int, text: str, devices: int = 0) -> None:
        """Stop a run at its next loop check. Only tenants' programs on CPUs and GPUs have checks."""
        if self._stops is not None:
            self._stops.stop(sequence, text, devices)

    # ---- arrays

    def put(self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]], are_lent: bool = False) -> Any:
        """Return a stacked array made of one host array per shard.

        Nothing may modify the host arrays afterwards, unless they `are_lent`.
        """
        devices = self._devices(array.devices)
        has_layout = array.layout is not None and array.layout != tuple(range(len(array.layout)))
        is_even, kind = len(set(array.shard_shapes)) == 1, contents[0].dtype.kind
        # jaxlib copies small contents into its memory faster than NumPy. It does not donate memory that is not its own,
        # so small contents, for which a copy takes 2 us at most, are copied also if they are not lent.
        is_copied = are_lent or sum([content.nbytes for content in contents]) <= _SMALL_BYTES
        is_copied_by_jaxlib = is_copied and is_even and not has_layout and kind != "T"
        if are_lent and not is_copied_by_jaxlib:
            contents = [host_data.copied(content) for content in contents]
        if has_layout:
            return self.stack(array, self._put_with_layout(array, contents, devices))
        if not is_even or (kind == "T" and len(contents) > 1):
            # jaxlib would make one buffer for equal strings on several devices.
            return UnevenShards(self._put_singly(array, contents, devices))
        shape = array.shard_shapes[0]
        if not shape and len({content.tobytes() for content in contents}) > 1:
            # jaxlib would copy the first one to all devices, because it takes an array of scalars for replicated.
            return self.stack(array, self._put_singly(array, [each.copy() for each in contents], devices))
        aval, sharding = stacked_type(contents[0].dtype, shape, devices, array.memory_kind)
        if is_copied_by_jaxlib and len(contents) > 1:
            contents = _with_separate_memory(contents)
        semantics = _ONLY_DURING_CALL if is_copied_by_jaxlib else _ZERO_COPY
        return xc.batched_device_put(
            aval, sharding, list(contents), list(devices), True, host_buffer_semantics=semantics
        )

    def _put_singly(
        self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]], devices: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        return tuple(
            xc.batched_device_put(
                jax.core.ShapedArray(shape, content.dtype),
                self._single(device, array.memory_kind),
                [content],
                [device],
                True,
            )
            for shape, content, device in zip(array.shard_shapes, contents, devices, strict=True)
        )

    def _put_with_layout(
        self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]], devices: tuple[Any, ...]
    ) -> list[Any]:
        assert array.layout is not None
        layout = Layout(array.layout)
        return [
            jax.device_put(content, Format(layout, self._single(device, array.memory_kind)))
            for content, device in zip(contents, devices, strict=True)
        ]

    def shards(self, array: Any) -> Sequence[Any]:
        return shards_of(array)

    def stack(self, array: LocalArray, shards: Sequence[Any]) -> Any:
        """Return a stacked array made of single-device arrays on their devices, without copying."""
        if len(shards) == 1:
            return shards[0]
        if len({each.device.client for each in shards}) > 1:
            shards = [self._worlds.bring(each, 0) for each in shards]
        if len(set(array.shard_shapes)) > 1 or array.dtype == "string":
            return UnevenShards(tuple(shards))
        devices = tuple(each.device for each in shards)
        aval, sharding = stacked_type(shards[0].dtype, shards[0].shape, devices, array.memory_kind)
        return jax_array.ArrayImpl(aval, sharding, list(shards), committed=True, _skip_checks=True)

    def move(self, array: Any, target: LocalArray, donate: bool) -> Any:
        """Copy each shard to the target's device and memory."""
        if not self._worlds.is_at_home(array, 0):
            array = self._worlds.bring(array, 0)
        devices = self._devices(target.devices)
        semantics = xc.ArrayCopySemantics.DONATE_INPUT if donate else xc.ArrayCopySemantics.ALWAYS_COPY
        if isinstance(array, UnevenShards):
            return UnevenShards(
                tuple(
                    self._copy(shard, (device,), target.memory_kind, semantics)
                    for shard, device in zip(array.shards, devices, strict=True)
                )
            )
        return self._copy(array, devices, target.memory_kind, semantics)

    def copy(self, array: Any) -> Any:
        """Return a copy on the same devices, for an input that a function consumes and its caller keeps."""
        devices = tuple(shard.device for shard in shards_of(array))
        kind = "" if array.sharding.memory_kind is None else array.sharding.memory_kind
        return self._copy(array, devices, kind, xc.ArrayCopySemantics.ALWAYS_COPY)

    def _copy(self, array: Any, devices: tuple[Any, ...], memory_kind: str, semantics: Any) -> Any:
        shards = shards_of(array)
        aval, sharding = stacked_type(array.dtype, shards[0].shape, devices, memory_kind)
        if len(self._island) > 1 or devices[0].client is not self.client:
            # The array may also be on devices of other hosts, and jaxlib only copies it to as many devices.
            singles = [self._single(device, memory_kind) for device in devices]
            lists = [xc.DeviceList((device,)) for device in devices]
            moved = xc.batched_copy_array_to_devices_with_sharding(
                list(shards), lists, singles, [semantics] * len(devices)
            )
            return moved[0] if len(moved) == 1 else jax_array.ArrayImpl(aval, sharding, moved, True, _skip_checks=True)
        (moved,) = xc.batched_copy_array_to_devices_with_sharding(
            [array], [xc.DeviceList(devices)], [sharding], [semantics]
        )
        return moved

    def bitcast(self, shard: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return _bitcast(shard, numpy_dtype(dtype), shape)

    def release_memory(self) -> None:
        """Make jaxlib drop its references to the host memory of deleted arrays.

        Otherwise, jaxlib does that at its next call, or when Python collects garbage.
        """
        _jax.collect_garbage()

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        return {name: int(value) for name, value in (self.devices[ordinal].memory_stats() or {}).items()}

    def begin_profile(self, recording: Recording) -> Callable[[], bytes]:
        options = _profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python in a worker is not the user's, and tracing it slows all sessions
        options.host_tracer_level = recording.host_tracer_level
        if recording.advanced:
            options.advanced_configuration = dict(recording.advanced)
        session = _profiler.ProfilerSession(options)
        return lambda: bytes(session.stop())

    def default_layout(self, dtype: str, shape: tuple[int, ...], ordinal: int) -> str:
        if dtype in ("token", "opaque", "string"):
            return "{" + ",".join(str(i) for i in reversed(range(len(shape)))) + "}"
        return str(self.client.get_default_layout(numpy_dtype(dtype), shape, self.devices[ordinal]))

    # ---- helpers

    def _devices(self, ordinals: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self.devices[ordinal] for ordinal in ordinals)

    def _single(self, device: Any, memory_kind: str) -> SingleDeviceSharding:
        return SingleDeviceSharding(device, memory_kind=memory_kind or None)


def _bitcast(shard: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    def reinterpret(x: Any) -> Any:
        wide, narrow = np.dtype(dtype).itemsize, x.dtype.itemsize
        if wide > narrow:
            x = x.reshape(-1, wide // narrow)
        return jax.lax.bitcast_convert_type(x, dtype).reshape(shape)

    return jax.jit(reinterpret, out_shardings=shard.sharding)(shard)


def self_test(backend: XlaBackend) -> None:
    """Run one small program through every private call. Raises an error if this jaxlib does not support them."""
    ordinals = tuple(range(min(2, len(backend.devices))))
    array = LocalArray("float32", (len(ordinals),), ((1,),) * len(ordinals), ordinals, ordinals)
    lent = np.ones((len(ordinals), 1), np.float32)
    ones = backend.put(array, list(lent), are_lent=True)
    lent[:] = 0
    shards = shards_of(backend.stack(array, list(shards_of(ones))))
    moved = backend.move(backend.stack(array, list(shards)), array, donate=False)
    stacked_handler("float32", (1,), tuple(backend.devices[i] for i in ordinals), "")
    is_whole = moved.nbytes == sum(content.nbytes for content in lent)
    if not is_whole or [float(np.asarray(shard)[0]) for shard in shards_of(moved)] != [1.0] * len(ordinals):
        raise RuntimeError(f"jaxlib {jax.lib.__version__} does not behave as this worker requires")


def open_backend(devices: int, cache_directory: str, member: IslandMembership | None) -> DeviceBackend:
    """Start JAX and return this host's devices. With a membership, wait until all hosts of the island have joined.

    Raises RuntimeError if this jaxlib does not support a worker, or if a host does not join in time.
    """
    if JAX_PLATFORMS.text() == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
    programs = open_programs(cache_directory)
    use_programs(programs, cache_directory)
    if member is not None:
        xla_island.join(member.address, member.rank, member.hosts, member.hostname)
    backend = XlaBackend(programs)
    BatchThreads().start()
    check_in_use(backend.client)
    self_test(backend)
    return backend


def _with_separate_memory(contents: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Copy the arrays whose memory an earlier one has, since jaxlib cannot copy the same memory twice in one call."""
    found: dict[int, np.ndarray[Any, Any]] = {}
    for content in contents:
        address = content.__array_interface__["data"][0]
        if address in found:
            content = content.copy()
            address = content.__array_interface__["data"][0]
        found[address] = content
    return list(found.values())
