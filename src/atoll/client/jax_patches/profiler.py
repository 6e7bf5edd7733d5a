"""Makes `jax.profiler` record the cluster's hosts in addition to this process.

jaxlib's profiler records only its own process. Therefore each profiler session also starts one on the hosts, whose
profiles are then written to the script's log directory: one file per host, beside the script's own, which TensorBoard
shows as hosts of one run. For a cluster with one host there is one file for both, as in stock JAX. The hosts' profiles
arrive in parts, as calls of a callable.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atoll.client.jax_patches.client_channel import ClientChannel
from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll
from atoll.decodable import decodable
from atoll.host_services.profiles import xspace
from atoll.protocol import profiles
from atoll.protocol.questions import MissingHosts, ProfileQuestion

_FILES = "*.xplane.pb"

# The last profile of this process and its session, while the hosts still keep their profiles.
uncollected: list[tuple[Any, _ClusterProfilerSession]] = []


def _with_hosts(session_class: Callable[..., Any]) -> Callable[..., Any]:
    def ProfilerSession(*arguments: Any) -> Any:
        client = _client()
        if client is None:
            return session_class(*arguments)

        def ask_hosts(request: profiles.Request) -> MissingHosts:
            return msgspec.json.decode(ask(client, ProfileQuestion(request)), type=decodable(MissingHosts))

        hosts = {(device.slice_index, device.host) for device in client.devices()}
        return _ClusterProfilerSession(
            _recording(*arguments),
            lambda: session_class(*arguments),
            ask_hosts,
            CLIENT_CHANNEL,
            client,
            joins=len(hosts) == 1,
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
        host_tracer_level=max(0, min(3, options.host_tracer_level)), advanced=dict(options.advanced_configuration or {})
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


class _ClusterProfilerSession:
    """A session of jaxlib's profiler in this process, created by `make`, and one on each host.

    `ask` sends a request to all hosts through the proxy; its exceptions pass through the constructor. The hosts' files
    arrive on `channel` as calls of a callable. If `joins` is set, for a single host, the host's profile becomes part of
    this process's file.
    """

    def __init__(
        self,
        recording: profiles.Recording,
        make: Callable[[], Any],
        ask: Callable[[profiles.Request], MissingHosts],
        channel: ClientChannel,
        client: Any,
        joins: bool = False,
    ) -> None:
        self._ask = ask
        self._channel = channel
        self._client = client
        self._joins = joins
        _report(ask(profiles.Start(recording)))
        try:
            self._own = make()
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        with suppress(Exception):
            self._ask(profiles.Collect())

    def stop(self) -> Any:
        """End all sessions; return the profile of this process."""
        self._drop()
        return self._own.stop()

    def stop_and_export(self, directory: str) -> None:
        """End all sessions and write the profiles. Write that of this process even if the hosts' profiles are lost."""
        self._stop_hosts()
        self._own.stop_and_export(directory)
        self.collect(directory)

    def stop_and_get_profile_data(self) -> Any:
        """End all sessions; return the profile of this process.

        The hosts keep their profiles until JAX (0.12 or later) exports this one.
        """
        self._stop_hosts()
        data = self._own.stop_and_get_profile_data()
        uncollected[:] = [(data, self)]
        return data

    def _stop_hosts(self) -> None:
        with _warning("the hosts continue to record until their profiles are collected"):
            self._ask(profiles.Stop())

    def collect(self, directory: str) -> None:
        """Write the hosts' files into the latest run of a log directory."""
        with _warning("the profiles of the hosts are missing"):
            run = _latest_run(directory)
            own = list(run.glob(_FILES))
            files = _Files(run)
            numbers = self._channel.add(self._client, [files.take])
            try:
                _report(self._ask(profiles.Collect(callback=numbers[0])))
            finally:
                self._channel.remove(numbers)
            if self._joins and len(own) == 1:
                _join(own[0], [each for each in run.glob(_FILES) if each not in own])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _join(own: Path, others: Sequence[Path]) -> None:
    """Append the content of the other files to the file `own`, and remove them."""
    for other in others:
        content = xspace.joinable(other.read_bytes(), other.name.partition(".")[0])
        with open(own, "ab") as file:
            file.write(content)
        other.unlink()


@contextmanager
def _warning(consequence: str) -> Iterator[None]:
    """Turn exceptions into warnings: an incomplete profile must not end the user's program."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{consequence}: {error}", RuntimeWarning, stacklevel=5)


class _Files:
    """The files of the hosts in a directory. Each is written in parts, which arrive in order."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, head: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> tuple[()]:
        host, offset, _ = (int(each) for each in head)
        with open(self._directory / profiles.file_name(host), "ab" if offset else "wb") as file:
            if file.tell() != offset:
                raise ValueError(f"a part of host {host}'s profile is missing before byte {offset}")
            file.write(part.data if part.size else b"")
        return ()


def _latest_run(directory: str) -> Path:
    runs = [each for each in os.scandir(Path(directory, "plugins", "profile")) if each.is_dir()]
    return Path(max(runs, key=lambda each: each.stat().st_mtime_ns))


def _report(missing: MissingHosts) -> None:
    for host, reason in missing.reasons.items():
        warnings.warn(f"the profile of host {host} is missing: {reason}", RuntimeWarning, stacklevel=2)


PATCH = Patch(
    name="profiler",
    enables="profiles of the hosts in `jax.profiler`",
    changes=(Replacement("jaxlib._profiler", "ProfilerSession", _with_hosts, ()),),
)

# Before JAX 0.12, jaxlib's profiler session exports the files by itself.
EXPORT_PATCH = Patch(
    name="exported profiles",
    enables="profiles of the hosts in the log directory of `jax.profiler`",
    changes=(
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
