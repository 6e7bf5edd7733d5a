"""What runs in Ray's workers: an actor that holds a cluster's engine, and one for each host that holds its agent.

Each starts a process of its own and does nothing else: a worker in an actor's process would share its interpreter with
Ray's threads, and its exit status would be lost. The processes watch the actor's pid, so they end with it, and with the
raylet, whose end ends its actors.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from atoll.cluster.directories import default_cache_directory, usage_file
from atoll.cluster.processes.adopted_process import AdoptedProcess, PidFile, ProcessId
from atoll.cluster.settings import ClusterSettings
from atoll.engines.engine_options import EngineOptions, make_directory
from atoll.engines.ray.agent_watch import AgentWatch
from atoll.engines.start_engine import EngineProcess
from atoll.errors import AtollError
from atoll.journal.persisted_state import check_persisted
from atoll.security.access import TOKEN_VARIABLE
from atoll.security.roles import JOINING, Role
from atoll.security.start_security import advertised, kept_environment
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.sockets import free_address

NOTE = "engine"  # in the directory of a journal
_LAST_LINES = 20
_LINGER_SECONDS = 20.0  # after a start that failed, for whoever waits to learn why


class AgentEnd(NamedTuple):
    """How a host agent has ended: its exit status, and what it said last."""

    status: int
    text: str


class EngineStart(msgspec.Struct, frozen=True):
    """What a cluster on Ray is started with.

    `listen` is where its controller does, on the node of its actor: "" for any free port there. By TLS, unless it is to
    be `insecure`. Others know it by what it is to `advertise`, as `security.start_security.advertised` has it.
    """

    settings: ClusterSettings
    listen: str = ""
    advertise: str = ""
    insecure: bool = False
    name: str = ""  # of the cluster
    journal: str = ""  # of its controller: a directory on that node
    authority: str = ""  # the file on that node in which its authority and tokens are kept


class EngineBegun(NamedTuple):
    """Where the controller is reached, and by which strings others join it, by role, with TLS; or why it is not."""

    address: str
    joins: dict[Role, str]
    error: str


class Up(NamedTuple):
    """Why an engine is not up, "" where it is, and what its processes said last."""

    error: str
    messages: str


def _adopt(environment: Mapping[str, str]) -> None:
    """Makes this process, and what it starts, what the user's own would be.

    Ray gives its workers a niceness of 15, which a worker of Atoll would inherit, a limit to OpenMP's threads, which is
    not meant for what is below it, and a debugger that asks for Ray.
    """
    for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # none but root may take it back: see "Clusters" in the docs
        os.setpriority(os.PRIO_PROCESS, 0, 0)


class HostActor:
    """Holds the host agent of one bundle."""

    def run(self, arguments: list[str], environment: dict[str, str], seconds: float) -> AgentEnd:
        """Runs `atoll host` with these arguments to its end, or until it has hung for so many seconds."""
        _adopt(environment)
        host = [sys.executable, "-P", "-m", "atoll.operate.command", "host", *arguments, "--parent", str(os.getpid())]
        process = subprocess.Popen(
            host,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        watch = AgentWatch(process, seconds)
        last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)  # to Ray's log of this actor
            sys.stderr.flush()
            last.append(line.rstrip())
        return AgentEnd(process.wait(), watch.silence or (last[-1] if last else ""))


class EngineActor:
    """Holds the engine process of one cluster, and ends when that does.

    With the directory of a `journal`, the engine outlives an actor that is killed: Ray starts the actor again on the
    same node, and it finds the engine by a note in that directory.
    """

    def __init__(self, journal: str = "") -> None:
        self._engine: EngineProcess | AdoptedProcess
        self._directory: Path  # the engine's
        self._messages: BinaryIO
        self._is_up = False
        self._was_told = threading.Event()
        self._note = Path(journal) / NOTE if journal else None
        if self._note is not None:
            self._take_over(self._note)

    def _take_over(self, path: Path) -> None:
        """Where an actor before this one has been killed."""
        import ray

        if not ray.get_runtime_context().was_current_actor_reconstructed:
            return
        note = PidFile.read(path)
        if note is None or not note.held.runs:
            self._end_later(0.0)
            return
        PidFile(note.held, ProcessId.of(os.getpid()), note.directory).write(path)
        self._engine, self._directory, self._is_up = AdoptedProcess(note.held), Path(note.directory), True
        self._begin_watching()

    def _begin_watching(self) -> None:
        # Held open: its directory goes with the engine, when the log of a start that failed is yet to be read.
        self._messages = open(self._directory / "log", "rb")  # noqa: SIM115
        threading.Thread(target=self._watch, name="engine", daemon=True).start()

    def start(self, start: bytes, environment: dict[str, str]) -> EngineBegun:
        """Starts the engine. `start` is an EngineStart in JSON."""
        import ray

        _adopt(environment)
        given = msgspec.json.decode(start, type=EngineStart)
        here = ray.util.get_node_ip_address()
        try:
            listen = parse_address(given.listen or free_address(here))
            listen = listen if given.insecure else listen.secured()
            token = os.environ.get(TOKEN_VARIABLE, "")
            check_may_listen(listen, token)
            advertise = given.advertise or (here if listen.is_everywhere else "")
            address = advertised(listen, advertise)
            if given.journal:
                Path(given.journal).mkdir(mode=0o700, parents=True, exist_ok=True)
                check_persisted(Path(given.journal), given.settings)
            kept = kept_environment(Path(given.authority), token) if given.authority else {}
            self._directory = make_directory("ray")
            settings = msgspec.structs.replace(given.settings, ray_address=ray.get_runtime_context().gcs_address)
            with open(self._directory / "log", "ab") as log:
                engine = self._engine = EngineProcess(
                    EngineOptions(
                        settings,
                        str(self._directory),
                        listen=str(listen),
                        advertise=advertise,
                        parent=os.getpid(),
                        cache_directory=default_cache_directory(),
                        usage_file=usage_file(given.name),
                        journal=given.journal,
                        note=str(self._note or ""),
                    ),
                    output=log.fileno(),
                    environment=kept,
                )
            if self._note is not None:
                PidFile(ProcessId.of(engine.process.pid), ProcessId.of(os.getpid()), str(self._directory)).write(
                    self._note
                )
        except (AtollError, OSError) as error:
            self._end_later()
            return EngineBegun("", {}, str(error))
        self._begin_watching()
        try:
            joins = {role: str(engine.join_token(role)) for role in JOINING} if listen.tls else {}
        except AtollError as error:
            return EngineBegun("", {}, str(error))
        return EngineBegun(str(address), joins, "")

    def up(self) -> Up:
        """Returns once the cluster is up, or is not to be."""
        assert isinstance(self._engine, EngineProcess)
        try:
            self._engine.wait_until_up()
            self._is_up = True
            return Up("", "")
        except AtollError as error:
            self._engine.end()
            return Up(str(error), self._last_messages())
        finally:
            self._was_told.set()

    def ended(self) -> None:
        """Returns once the engine has ended."""
        self._engine.wait()

    def end(self) -> None:
        """Ends the engine, and returns when nothing of the cluster is left, in Ray or elsewhere."""
        self._engine.end()

    def _last_messages(self) -> str:
        self._messages.seek(0)
        return "\n".join(self._messages.read().decode(errors="replace").splitlines()[-_LAST_LINES:])

    def _watch(self) -> None:
        self._engine.wait()
        shutil.rmtree(self._directory, ignore_errors=True)  # where it was killed
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        if not self._is_up:
            self._was_told.wait(_LINGER_SECONDS)
        self._end_later(0.0 if self._is_up else 1.0)

    def _end_later(self, seconds: float = _LINGER_SECONDS) -> None:
        def end() -> None:
            import ray

            with contextlib.suppress(Exception):
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

        threading.Timer(seconds, end).start()
