"""Transformations of HLO modules that the user has registered with JAX (`jax.extend.xla`): hosts call them, too.

JAX registers them with the compiler of this process, and with the clients whose platforms they are for. Programs for
Atoll are compiled on hosts, which get the keys of these along with each program, and ask for each by a call
(`compile_time_callbacks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.errors import invalid
from atoll.host_services.calls.client_compile_calls import Decide
from atoll.protocol.compile_calls import TRANSFORMATION, CompileAnswer, CompileCall, Transform

_Callback = Callable[[bytes], bytes | None]
_Registered = dict[tuple[int, str], _Callback]  # by stage and name, in the order in which XLA is to call them

_for_cpus: _Registered = {}
_for_clients: _Registered = {}  # of Atoll


def transformations(platform: str) -> dict[bytes, Decide]:
    """Those for Atoll's devices of a platform, by their keys."""
    registered = _for_cpus | _for_clients if platform == "cpu" else _for_clients
    return {
        b"%s:%d:%s" % (TRANSFORMATION, stage, name.encode()): _transforming(callback)
        for (stage, name), callback in registered.items()
    }


def _transforming(callback: _Callback) -> Decide:
    def decide(call: CompileCall) -> CompileAnswer:
        if not isinstance(call, Transform):
            raise invalid("a transformation of modules was asked for something else")
        return CompileAnswer(program=callback(call.module) or b"")

    return decide


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_xla_transform(name: str, stage: int, callback: _Callback) -> Any:
        done = register(name, stage, callback)
        _for_cpus[stage, name] = callback
        return done

    return register_xla_transform


def _registering_for_clients(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_xla_transform_c_api(client: Any, name: str, stage: int, callback: _Callback) -> Any:
        if not is_atoll(client):
            return register(client, name, stage, callback)
        _for_clients[stage, name] = callback
        return None

    return register_xla_transform_c_api


def _clearing(clear: Callable[..., bool]) -> Callable[..., bool]:
    def clear_xla_transform(name: str, stage: int) -> bool:
        _for_cpus.pop((stage, name), None)
        return clear(name, stage)

    return clear_xla_transform


def _clearing_for_clients(clear: Callable[..., bool]) -> Callable[..., bool]:
    def clear_xla_transform_c_api(client: Any, name: str, stage: int) -> bool:
        if not is_atoll(client):
            return clear(client, name, stage)
        return _for_clients.pop((stage, name), None) is not None

    return clear_xla_transform_c_api


_LIFTS = "what jax.extend.xla.register_hlo_module_transformation registers is not called for programs on Atoll"

PATCH = Patch(
    name="transformations of modules",
    lifts=_LIFTS,
    replacements=(
        Replacement("jaxlib._xla", "register_xla_transform", _registering, ("name", "stage", "callback")),
        Replacement("jaxlib._xla", "clear_xla_transform", _clearing, ("name", "stage")),
    ),
)

# What is registered before there is a client, and what is for other devices than CPUs. Later versions of JAX make all
# clients first, and know no client of other devices but those of PjRt's plug-ins.
CLIENT_PATCH = Patch(
    name="transformations of modules for clients",
    lifts=_LIFTS,
    replacements=(
        Replacement(
            "jaxlib._xla",
            "register_xla_transform_c_api",
            _registering_for_clients,
            ("client", "name", "stage", "callback"),
        ),
        Replacement("jaxlib._xla", "clear_xla_transform_c_api", _clearing_for_clients, ("client", "name", "stage")),
    ),
    before=(0, 11),
)
