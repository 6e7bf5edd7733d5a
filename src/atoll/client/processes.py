"""The processes of a client: its proxy and, if the cluster is embedded, the cluster.

They are children of this process in process sessions of their own, so that Ctrl-C reaches only the script. They watch
this process and end when it ends, for any reason.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from atoll.client.deferred_interrupts import deferred_interrupts
from atoll.client.jaxlib_logging import silence_jaxlib
from atoll.cluster.cluster_file import settings_from_environment
from atoll.cluster.directories import default_cache_directory, make_directory
from atoll.cluster.environment_variables import ADDRESS, DETACH, JOIN, NOTEBOOK, PYTHON_ENVIRONMENT, RUN, TOKEN
from atoll.cluster.misspelled_variables import misspelled_variables
from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.processes.child import Child, describe_exit
from atoll.cluster.processes.client_directories import (
    claim,
    make_transfer_directory,
    remove,
    sweep,
    transfer_bases,
    transfer_directory,
)
from atoll.cluster.processes.lifeline import watch_in_thread
from atoll.cluster.processes.process_runtime import open_standard_streams
from atoll.cluster.settings import DEFAULT_ISLANDS, SETTINGS, ClusterSettings
from atoll.cluster.state_machine import StateMachine
from atoll.engines.engine_options import EngineOptions
from atoll.engines.start_engine import EngineProcess, check_settings
from atoll.errors import AtollError, ClusterError, UnreachableError, error_kind
from atoll.ifrt.proxy_options import END_COMPILATIONS, ProxyOptions, Ready, start_proxy
from atoll.operate.cluster_registry import register_embedded, standing_clusters

if TYPE_CHECKING:
    from atoll.operate.joining import Reach

_KERNEL = "ipykernel_launcher.py"  # of a notebook
_PATIENCE_SECONDS = 5.0  # to reach a controller that is up
_ROOM_BYTES = 1 << 30  # space for large arrays on their way to the proxy

_taken: tuple[int, NamedRun] = (0, UNNAMED)  # this process, and its run


class ClusterChoice(msgspec.Struct, frozen=True):
    """The cluster of a client: at `address`, or at the address in `join`, or an embedded cluster if both are ""."""

    address: str
    token: str
    cluster: ClusterSettings
    join: str = ""  # the join token, or a file with it
    run: NamedRun = UNNAMED

    @classmethod
    def from_environment(cls) -> ClusterChoice:
        """Read the environment's values. Raise ClusterError if one is invalid."""
        return cls(
            ADDRESS.text(),
            TOKEN.text(),
            settings_from_environment(),
            JOIN.text(),
            _own_run(),
        )


def _own_run() -> NamedRun:
    """Return the run that the environment names, and remove it from there. Later calls return the same one.

    Otherwise a process that this one starts would wait for the end of this one's session if it uses JAX.
    """
    global _taken
    if RUN.variable in os.environ or DETACH.variable in os.environ:
        _taken = os.getpid(), NamedRun(RUN.text(), DETACH.get() or 0.0)
        os.environ.pop(RUN.variable, None)
        os.environ.pop(DETACH.variable, None)
    pid, run = _taken
    return run if pid == os.getpid() else UNNAMED  # a fork has another pid


class ProxyState(enum.IntEnum):
    """The state of a client's proxy, as far as this process has seen."""

    STARTING = 0
    UP = 1
    LOST = 2  # it has ended although it was up and this process was using it
    ENDING = 3  # this process ends it or leaves it, so that its end is expected
    ENDED = 4  # as ENDING, and this process has seen its end; or it was never up


_S = ProxyState

# The states that may follow each state. The comments name the methods of `ClientProcesses` that cause the transitions.
TRANSITIONS: dict[ProxyState, frozenset[ProxyState]] = {
    _S.STARTING: frozenset({_S.UP, _S.ENDED}),  # `wait_until_up`; `_expect_ends`
    _S.UP: frozenset({_S.LOST, _S.ENDING}),  # `_note_end`; `_expect_ends`
    _S.LOST: frozenset({_S.ENDED}),  # `_expect_ends`
    _S.ENDING: frozenset({_S.ENDED}),  # `_note_end`
    _S.ENDED: frozenset(),
}
_IN_USE = (_S.STARTING, _S.UP, _S.LOST)  # ends of processes are not expected
_RUNS = (_S.UP, _S.ENDING)


class ClientProcesses(StateMachine[ProxyState]):
    """A proxy and possibly a cluster.

    The constructor starts them and returns at once, or raises AtollError. `wait_until_up` has to be called next. An
    embedded cluster stores compiled programs in `cache_directory`, unless ATOLL_CACHE_DIR is set.
    """

    transitions = TRANSITIONS

    def __init__(self, choice: ClusterChoice, cache_directory: str = "") -> None:
        self.state: ProxyState = ProxyState.STARTING
        open_standard_streams()
        for line in misspelled_variables(os.environ):
            sys.stderr.write(f"atoll: {line}\n")
        # Check everything before creating directories and processes.
        reached = _reach(choice) if choice.address or choice.join else None
        if reached is None:
            check_settings(choice.cluster)
            note_standing_clusters(choice.cluster.islands)
        self._directory = make_directory("client")
        self.transfer_directory = transfer_directory(_shared_memory())
        claim(self._directory, self.transfer_directory)
        make_transfer_directory(self.transfer_directory)
        sweep(self._directory.parent)
        self._losses = self._directory / "losses"
        self._losses.touch()
        self._known_losses = 0
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._proxy: Child | None = None  # from its start on
        self._engine: EngineProcess | None = None
        self.token = choice.token
        self.join = reached.join if reached is not None else None
        self.is_embedded = reached is None
        self._run = choice.run
        self._environment = {TOKEN.variable: self.token, JOIN.variable: str(self.join or "")}
        try:
            with deferred_interrupts():  # otherwise a process may run that `_children` does not have
                if reached is None:
                    self._engine = self._start_cluster(choice, cache_directory)
                    self.controller = self._engine.address
                else:
                    self.controller = str(reached.address)
                # The proxy starts while the cluster starts. If the cluster fails, this process ends the proxy.
                start_seconds = 0.0 if self._engine is None else self._engine.start_seconds
                self._proxy = self._start_proxy(_PATIENCE_SECONDS + start_seconds)
        except BaseException:
            self.close()
            raise

    def wait_until_up(self) -> str:
        """Return the proxy's address when the proxy and the cluster are up.

        Raise AtollError, after ending the processes, if one of them does not start.
        """
        engine, proxy = self._engine, self._proxy
        assert proxy is not None
        try:
            if engine is not None:
                engine.wait_until_up()
            ready = proxy.read(Ready, is_last=False)
            with contextlib.suppress(RuntimeError):  # an exit handler can start no thread since Python 3.12
                proxy.watch(self._session_lost)
            if ready.error:
                raise proxy_error(ready.error, ready.message, "" if engine is not None else self.controller)
            with self._lock:
                if self.state is _S.STARTING:
                    self.enter(_S.UP)
            with contextlib.suppress(RuntimeError):
                watch_in_thread(proxy.process.pid, self._proxy_ended)
        except BaseException:
            self.close()
            raise
        return ready.address

    def _start_cluster(self, choice: ClusterChoice, cache_directory: str) -> EngineProcess:
        directory = self._directory / "cluster"
        directory.mkdir(mode=0o700)
        options = EngineOptions(
            choice.cluster,
            str(directory),
            parent=os.getpid(),
            cache_directory=default_cache_directory(cache_directory),
            client_directories=(str(self.transfer_directory), str(self._directory)),
        )
        # The Python processes on the hosts belong to the same user as this process.
        everything = {PYTHON_ENVIRONMENT.variable: os.environ.get(PYTHON_ENVIRONMENT.variable, "*")}
        engine = EngineProcess(options, "the embedded cluster", environment=self._environment | everything)
        self._children.append(engine)
        cluster = choice.cluster
        register_embedded(
            self._directory, engine.address, cluster.islands, cluster.platform, engine.process.pid, script_name()
        )
        return engine

    def _start_proxy(self, patience: float) -> Child:
        """Start the proxy, which tries to reach the controller for `patience` seconds."""
        options = ProxyOptions(
            f"unix:{self._directory}/proxy.sock",
            self.controller,
            os.getpid(),
            label=script_name(),
            client=os.getpid(),
            directory=str(self._directory),
            transfer_directory=str(self.transfer_directory),
            losses=str(self._losses),
            run=self._run,
            patience=patience,
        )
        proxy = start_proxy(options, self._environment)
        self._children.append(proxy)
        return proxy

    def losses(self) -> int:
        """Return how many times, as far as the proxy knows, the cluster has lost hosts with the arrays on them.

        The number never decreases. After the proxy has ended and has removed the file, it stays what it was.
        """
        with contextlib.suppress(OSError):
            self._known_losses = os.stat(self._losses).st_size
        return self._known_losses

    def end_compilations(self) -> None:
        """Let the proxy answer all compile requests under way with an error."""
        if self._proxy is not None and self.state in _RUNS:
            silence_jaxlib()  # it would log each error
            self._proxy.send_signal(END_COMPILATIONS)

    def leave(self) -> None:
        """Leave the processes to end by themselves, because this process ends. Clean up if one has already ended."""
        self._expect_ends()
        ended = any(child.process.poll() is not None for child in self._children)
        for child in self._children:
            child.leave()
        if ended:
            self._remove_directories()

    def close(self) -> None:
        """End the processes and remove their directories."""
        with deferred_interrupts():  # a second Ctrl-C would leave processes running
            self._expect_ends()
            for child in reversed(self._children):
                child.end()
                child.stop_reading()
            with self._lock:
                self._note_end()  # it may have been about to exit
            self._remove_directories()

    def _expect_ends(self) -> None:
        """Treat the exit of a process as expected from now on."""
        with self._lock:
            self._note_end()
            if self.state is _S.UP:
                self.enter(_S.ENDING)
            elif self.state in _IN_USE:
                self.enter(_S.ENDED)

    def _described(self) -> str:
        return "the proxy of this process"

    def _session_lost(self) -> None:
        """Silence jaxlib before the proxy answers its requests with errors, which are all raised.

        Called on the thread that reads what the proxy reports.
        """
        with self._lock:
            if self.state in _IN_USE:
                silence_jaxlib()

    def _proxy_ended(self) -> None:
        """Remove the directory for large arrays: the client may still write there, but the proxy no longer reads.

        Errors of all later operations are raised, so jaxlib need not log them too. Called on the thread that watches
        the proxy.
        """
        with self._lock:
            if self.state in _IN_USE:  # otherwise the next client of this process may already use the directory
                shutil.rmtree(self.transfer_directory, ignore_errors=True)
                silence_jaxlib()
                self._note_end()

    def _note_end(self) -> None:
        """Note if the proxy has ended. If it was killed, print what to do, since the errors of JAX do not say it."""
        status = self._proxy.process.poll() if self._proxy is not None and self.state in _RUNS else None
        if status is None:
            return
        self.enter(_S.LOST if self.state is _S.UP else _S.ENDED)
        if status == -signal.SIGKILL:
            text = (
                f"atoll: the proxy of this process has ended ({describe_exit(status)}), with its session and arrays. "
                "To continue from a checkpoint in this process, call clear_backends() of jax.extend.backend: JAX then "
                "connects again. Or start the script again\n"
            )
            sys.stderr.write(text)
            sys.stderr.flush()

    def _remove_directories(self) -> None:
        remove(self._directory, self.transfer_directory)


def _reach(choice: ClusterChoice) -> Reach:
    """Return how to reach the cluster that `choice` names. Raise AtollError if that is invalid."""
    from atoll.operate.joining import reach  # a script that starts its own cluster does not need it

    return reach(choice.address, choice.join)


def _shared_memory() -> Path:
    """Return a directory for large arrays on their way to the proxy: shared memory, if enough of it is free.

    jaxlib's client ends its process if it cannot write there. Containers often have only 64 MiB of shared memory.
    """
    places = [place for place in transfer_bases() if os.access(place, os.W_OK)]
    return place_with_room(places, {place: shutil.disk_usage(place).free for place in places})


def place_with_room(places: Sequence[Path], free: Mapping[Path, int]) -> Path:
    """Return the first place with `_ROOM_BYTES` free, or the place with the most free space."""
    return next((each for each in places if free[each] >= _ROOM_BYTES), max(places, key=lambda each: free[each]))


def proxy_error(name: str, message: str, address: str) -> AtollError:
    """Return the exception for an error that the proxy reports. Its message says what to start."""
    kind = error_kind(name) or ClusterError
    if address and kind is UnreachableError:
        if ADDRESS.text() and JOIN.text():
            message += "; ATOLL_ADDRESS is set, so ATOLL_JOIN is not used: unset one of them"
        elif ADDRESS.text():
            message += "; start a cluster with `atoll up`, or unset ATOLL_ADDRESS to use an embedded cluster"
        elif JOIN.text():
            message += (
                "; this is the address in the join token of ATOLL_JOIN: check that the cluster is up and that this "
                "machine reaches the port, or use the cluster's current join token"
            )
        else:
            message += "; start a cluster with `atoll up`, or pass the address of one that is up"
    return kind(message)


def note_standing_clusters(islands: str) -> None:
    """Print that the script starts an embedded cluster, if its user also has a standing one."""
    chosen = SETTINGS["islands"]
    if islands != DEFAULT_ISLANDS or chosen.variable in os.environ:
        return  # the user has chosen the cluster
    with contextlib.suppress(OSError, ClusterError):
        for record in standing_clusters()[:1]:
            sys.stderr.write(
                f"atoll: this script starts its own cluster ({islands}), although cluster {record.name} is up. To use "
                f"that one, set ATOLL_ADDRESS={quote(record.reached_at)}; to hide this line, set "
                f"{chosen.variable}={islands}\n"
            )
            sys.stderr.flush()


def script_name() -> str:
    """Return the file name of this process's script or notebook, or "python", for status displays."""
    first = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    name = "python" if first in ("-c", "-m") else Path(first).name
    if name == _KERNEL:
        return Path(NOTEBOOK.text() or "notebook").name
    return name
