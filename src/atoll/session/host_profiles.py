"""A profile of a client's process, with those of its hosts: started, ended and gathered together.

In the client's process: its files are what TensorBoard shows as the hosts of one run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from atoll.host_services.calls.callback_table import CallbackTable
from atoll.host_services.profiles import xspace
from atoll.protocol import profiles
from atoll.protocol.questions import MissingHosts

# What this process has recorded last, with the session of it, while the hosts keep theirs.
uncollected: list[tuple[Any, HostsToo]] = []


class HostsToo:
    """A session of jaxlib's profiler here, which `make` makes, and one on each host. Raises what `ask` raises.

    `ask` has the proxy do something on all hosts. The hosts' files come as calls of a callable in the client's `table`.
    With `joins`, for one host, its profile becomes part of the file of this process, as if they were one.
    """

    def __init__(
        self,
        recording: profiles.Recording,
        make: Callable[[], Any],
        ask: Callable[[profiles.Request], MissingHosts],
        table: CallbackTable,
        client: Any,
        joins: bool = False,
    ) -> None:
        self._ask = ask
        self._table = table
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
        uncollected[:] = [(data, self)]
        return data

    def _stop_hosts(self) -> None:
        with _warning("the hosts' recording goes on until they have handed it over"):
            self._ask(profiles.Stop())

    def collect(self, directory: str) -> None:
        """Has the hosts' files written into the latest run of a log directory."""
        with _warning("there are no profiles of the hosts"):
            run = _latest_run(directory)
            own = list(run.glob(_FILES))
            files = _Files(run)
            numbers = self._table.add(self._client, [files.take])
            try:
                _report(self._ask(profiles.Collect(callback=numbers[0])))
            finally:
                self._table.remove(numbers)
            if self._joins and len(own) == 1:
                _join(own[0], [each for each in run.glob(_FILES) if each not in own])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


_FILES = "*.xplane.pb"


def _join(own: Path, others: Sequence[Path]) -> None:
    """Appends the others' content to a file, and removes them."""
    for other in others:
        content = xspace.joinable(other.read_bytes(), other.name.partition(".")[0])
        with open(own, "ab") as file:
            file.write(content)
        other.unlink()


@contextmanager
def _warning(consequence: str) -> Iterator[None]:
    """What a profile lacks is no reason for the user's program to end."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{consequence}: {error}", RuntimeWarning, stacklevel=5)


class _Files:
    """One file a host in a directory, written as its parts come, in their order."""

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
        warnings.warn(f"there is no profile of host {host}: {reason}", RuntimeWarning, stacklevel=2)
