"""Programs that compiler processes have compiled, on disk. The key needs no look into the program."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
from jax._src.lib import xla_client as xc

from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram
from atoll.devices.xla.jax_cache import Programs

_VERSION = b"compiled program 1"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CompiledProgram).decode


class CompiledPrograms:
    """The compiled programs of `programs`, for these devices."""

    def __init__(self, programs: Programs | None, devices: Sequence[Any]) -> None:
        self._programs = programs
        self._machine = _described(devices) if programs is not None else b""

    def find(self, request: CompileProgram, tenant: str) -> CompiledProgram | None:
        """Return the program if it was compiled for this tenant before, on a machine like this one."""
        if self._programs is None or request.callbacks or request.keys:  # such a program is its session's only
            return None
        content = self._programs.get(self._key(request), tenant)
        return None if content is None else _decode(content)

    def keep(self, request: CompileProgram, tenant: str, program: CompiledProgram) -> None:
        """Store a compiled program."""
        if self._programs is not None and not (request.callbacks or request.keys):
            self._programs.put(self._key(request), _encode(program), tenant)

    def _key(self, request: CompileProgram) -> str:
        digest = hashlib.sha256(_VERSION)
        shape = f"{request.replicas} {request.partitions} {request.platform}".encode()
        for part in (self._machine, shape, request.options, request.program):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


def _described(devices: Sequence[Any]) -> bytes:
    """Describe everything that the code of a program depends on, besides the program and its options."""
    try:
        topology = str(xc.get_topology_for_devices(list(devices)).fingerprint())
    except jax.errors.JaxRuntimeError:
        topology = " ".join(device.device_kind for device in devices)
    versions = f"{jax.__version__} {jax.lib.__version__} {devices[0].client.platform_version}"
    return f"{versions} {topology} {os.environ.get('XLA_FLAGS', '')}".encode()
