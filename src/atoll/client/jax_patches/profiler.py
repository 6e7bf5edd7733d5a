"""Makes `jax.profiler` record the cluster's hosts in addition to this process.

jaxlib's profiler records only its own process. Therefore each profiler session also starts one on the hosts, whose
profiles are then written to the script's log directory: one file per host, beside the script's own, which TensorBoard
shows as hosts of one run. For a cluster with one host there is one file for both, as in stock JAX. The profiles arrive
in parts, as calls of a callable (`session/host_profiles.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.client.jax_patches.host_callbacks import TABLE
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll
from atoll.protocol import profiles
from atoll.protocol.questions import MissingHosts, ProfileQuestion
from atoll.session.host_profiles import HostsToo, uncollected


def _with_hosts(session_class: Callable[..., Any]) -> Callable[..., Any]:
    def ProfilerSession(*arguments: Any) -> Any:
        client = _client()
        if client is None:
            return session_class(*arguments)

        def ask_hosts(request: profiles.Request) -> MissingHosts:
            return msgspec.json.decode(ask(client, ProfileQuestion(request)), type=MissingHosts)

        hosts = {(device.slice_index, device.host) for device in client.devices()}
        return HostsToo(
            _recording(*arguments), lambda: session_class(*arguments), ask_hosts, TABLE, client, joins=len(hosts) == 1
        )

    return ProfilerSession


def _client() -> Any:
    """Return Atoll's client if JAX has created it, or None.

    Skip the client of the platform "proxy": pathwaysutils starts the hosts' profiles for it.
    """
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        return None
    clients = xla_bridge.backends().items()
    return next((client for platform, client in clients if platform != "proxy" and is_atoll(client)), None)


def _recording(options: Any = None) -> profiles.Recording:
    if options is None:
        return profiles.Recording()
    return profiles.Recording(
        host_tracer_level=max(0, min(3, options.host_tracer_level)),
        advanced=dict(options.advanced_configuration or {}),
    )


def _with_files_of_hosts(export: Callable[..., Any]) -> Callable[..., Any]:
    def export_profile_data(profile_data: Any, log_dir: Any, *arguments: Any, **named: Any) -> None:
        export(profile_data, log_dir, *arguments, **named)
        recorded = getattr(profile_data, "profile_data", profile_data)
        for data, session in list(uncollected):
            if data is recorded:
                uncollected.clear()
                session.collect(str(log_dir))

    return export_profile_data


PATCH = Patch(
    name="profiler",
    lifts="jax.profiler records only this process, and not the devices",
    replacements=(Replacement("jaxlib._profiler", "ProfilerSession", _with_hosts, ()),),
)

# Before JAX 0.12, jaxlib's profiler session exports the files by itself.
EXPORT_PATCH = Patch(
    name="exported profiles",
    lifts="the log directory lacks the profiles of the hosts",
    replacements=(
        Replacement(
            "jax._src.profiler",
            "export_profile_data",
            _with_files_of_hosts,
            ("profile_data", "log_dir"),
            copies=("jax.profiler",),
        ),
    ),
    since=(0, 12),
)
