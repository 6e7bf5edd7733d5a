"""Has `jax.profiler` record what the cluster's hosts do, beside what this process does.

jaxlib's profiler sees the process that it is in. So each session of it starts one on the hosts, too, and what they
have recorded comes into the script's log directory: one file a host, beside the script's own, which TensorBoard shows
as hosts of one run. The bytes come as calls of a callable, in parts (`client/callbacks.py`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atoll.client.jax_patches.host_callbacks import TABLE
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll
from atoll.protocol import profiles
from atoll.protocol.questions import MissingHosts, ProfileQuestion


def _with_hosts(session_class: Callable[..., Any]) -> Callable[..., Any]:
    def ProfilerSession(*arguments: Any) -> Any:
        client = _client()
        if client is None:
            return session_class(*arguments)
        return HostsToo(client, session_class, arguments)

    return ProfilerSession


def _client() -> Any:
    """Atoll's, if JAX has made it. Not that of the platform "proxy": there pathwaysutils starts the hosts' profiles."""
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        return None
    clients = xla_bridge.backends().items()
    return next((client for platform, client in clients if platform != "proxy" and is_atoll(client)), None)


# What this process has recorded last, with the session of it, while the hosts keep theirs.
_uncollected: list[tuple[Any, HostsToo]] = []


class HostsToo:
    """A session of jaxlib's profiler here, and one on each host. Raises JaxRuntimeError where a host refuses."""

    def __init__(self, client: Any, session_class: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._client = client
        _report(self._ask(profiles.Start(_recording(*arguments))))
        try:
            self._own = session_class(*arguments)
        except BaseException:
            self._drop()
            raise

    def _ask(self, request: profiles.Request) -> MissingHosts:
        return msgspec.json.decode(ask(self._client, ProfileQuestion(request)), type=MissingHosts)

    def _drop(self) -> None:
        with suppress(Exception):
            self._ask(profiles.Collect())

    def stop(self) -> Any:
        """Ends all; what this process has recorded."""
        self._drop()
        return self._own.stop()

    def stop_and_export(self, directory: str) -> None:
        """Ends all, and writes what was recorded: this process's first, whatever becomes of the hosts'."""
        self._stop_hosts()
        self._own.stop_and_export(directory)
        self.collect(directory)

    def stop_and_get_profile_data(self) -> Any:
        """Ends all; what this process has recorded. The hosts keep theirs until that is exported, from JAX 0.12 on."""
        self._stop_hosts()
        data = self._own.stop_and_get_profile_data()
        _uncollected[:] = [(data, self)]
        return data

    def _stop_hosts(self) -> None:
        with _warning("the hosts' recording goes on until they have handed it over"):
            self._ask(profiles.Stop())

    def collect(self, directory: str) -> None:
        """Has the hosts' files written into the latest run of a log directory."""
        with _warning("there are no profiles of the hosts"):
            files = _Files(_latest_run(directory))
            numbers = TABLE.add(self._client, [files.take])
            try:
                _report(self._ask(profiles.Collect(callback=numbers[0])))
            finally:
                TABLE.remove(numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@contextmanager
def _warning(consequence: str) -> Iterator[None]:
    """What a profile lacks is no reason for the user's program to end."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{consequence}: {error}", RuntimeWarning, stacklevel=5)


class _Files:
    """One file a host in a folder, written as its parts come, in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, head: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> tuple[()]:
        host, offset, _ = (int(each) for each in head)
        with open(self._folder / profiles.file_name(host), "ab" if offset else "wb") as file:
            if file.tell() != offset:
                raise ValueError(f"a part of host {host}'s profile is missing before byte {offset}")
            file.write(part.data if part.size else b"")
        return ()


def _recording(options: Any = None) -> profiles.Recording:
    if options is None:
        return profiles.Recording()
    return profiles.Recording(
        host_tracer_level=max(0, min(3, options.host_tracer_level)),
        advanced=dict(options.advanced_configuration or {}),
    )


def _latest_run(directory: str) -> Path:
    runs = [each for each in os.scandir(Path(directory, "plugins", "profile")) if each.is_dir()]
    return Path(max(runs, key=lambda each: each.stat().st_mtime_ns))


def _report(missing: MissingHosts) -> None:
    for host, reason in missing.reasons.items():
        warnings.warn(f"there is no profile of host {host}: {reason}", RuntimeWarning, stacklevel=2)


def _with_files_of_hosts(export: Callable[..., Any]) -> Callable[..., Any]:
    def export_profile_data(profile_data: Any, log_dir: Any, *arguments: Any, **named: Any) -> None:
        export(profile_data, log_dir, *arguments, **named)
        recorded = getattr(profile_data, "profile_data", profile_data)
        for data, session in list(_uncollected):
            if data is recorded:
                _uncollected.clear()
                session.collect(str(log_dir))

    return export_profile_data


PATCH = Patch(
    name="profiler",
    lifts="jax.profiler records this process alone, and nothing of the devices",
    replacements=(Replacement("jaxlib._profiler", "ProfilerSession", _with_hosts, ()),),
)

# Until JAX 0.12, a session of jaxlib's exports by itself.
EXPORT_PATCH = Patch(
    name="exported profiles",
    lifts="the log directory has no profiles of the hosts",
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
