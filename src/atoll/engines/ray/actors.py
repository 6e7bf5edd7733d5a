"""The actors in Ray's workers: one per cluster that holds its engine, and one per host that holds its agent.

Each actor only starts a process: a worker in the actor's process would share its interpreter with Ray's threads, and
its exit status would be lost. The processes watch the actor's pid, so they end with the actor, which ends with its
raylet.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from atoll.cluster.cluster_runs import RunRecord, open_log
from atoll.cluster.directories import default_cache_directory, make_directory, remove_tree, usage_file
from atoll.cluster.environment_variables import ADDRESS, AUTHORITY, HOST_TOKEN, INSECURE, ISLAND, JOIN, RANK, TOKEN
from atoll.cluster.processes.adopted_process import AdoptedProcess, PidFile, ProcessId
from atoll.cluster.processes.process_logging import logging_environment, warnings_in
from atoll.cluster.processes.startup_heartbeat import LOOK_SECONDS, ProcessActivity, StartWatch
from atoll.cluster.setting_forms import Setting
from atoll.cluster.settings import SETTINGS, ClusterSettings
from atoll.decodable import decodable
from atoll.engines.engine_options import EngineOptions
from atoll.engines.start_engine import EngineProcess
from atoll.errors import AtollError
from atoll.journal.persisted_state import check_persisted
from atoll.retries import Retry
from atoll.security.roles import JOINING, Role
from atoll.security.start_security import advertised, kept_environment
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.sockets import free_address

NOTE = "engine"  # name of the file in the directory of a journal
_LAST_LINES = 20
_LINGER_SECONDS = 20.0  # after a failed start, for the caller to read the reason
_DELIVERY_SECONDS = 1.0  # for Ray to deliver the result of a method before the actor ends
_NOTE_SECONDS = 10.0  # to read the note about a running engine, if the operating system refuses that for a while


class AgentEnd(NamedTuple):
    """The end of a host agent: its exit status and its last line of output."""

    status: int
    text: str


class EngineStart(msgspec.Struct, frozen=True):
    """The options of a cluster on Ray. Paths are on the node of the engine's actor."""

    settings: ClusterSettings
    listen: str = ""  # address of the controller; "" for any free port of the node
    advertise: str = ""  # see `security.start_security.advertised`
    insecure: bool = False  # listen without TLS
    name: str = ""  # of the cluster
    journal: str = ""  # directory of the controller's journal
    authority: str = ""  # file with the cluster's CA and tokens


class EngineBegun(NamedTuple):
    """The address of the controller and, with TLS, its join tokens by role; or the reason for a failed start."""

    address: str
    joins: dict[Role, str]
    error: str


class Up(NamedTuple):
    """The reason why an engine is not up, "" if it is, and the last output of its processes."""

    error: str
    messages: str


def _adopt(environment: Mapping[str, str]) -> None:
    """Adapt this process, whose children inherit its attributes, to the user's environment.

    Ray gives its workers a niceness of 15, a limit of OpenMP threads, and a debugger that needs Ray.
    """
    for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # only root may lower the niceness: see docs/operate/clusters.md
        os.setpriority(os.PRIO_PROCESS, 0, 0)


class HostActor:
    """Holds the host agent of one bundle."""

    def run(self, arguments: list[str], environment: dict[str, str], seconds: float) -> AgentEnd:
        """Run `atoll host` with these arguments until it ends, or until it has hung for `seconds`."""
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
    """Holds the engine process of one cluster, and ends with it.

    With the directory of a `journal`, the engine outlives an actor that is killed: Ray restarts the actor on the same
    node, and the actor finds the engine by a note in that directory.
    """

    def __init__(self, journal: str = "") -> None:
        self._engine: _Engine | None = None
        self._is_up = self._is_awaited = False
        self._start_reported = threading.Event()
        self._note = Path(journal) / NOTE if journal else None
        if self._note is not None:
            self._take_over(self._note)

    def _take_over(self, path: Path) -> None:
        """Adopt the engine of the note if Ray has restarted this actor."""
        import ray

        if not ray.get_runtime_context().was_current_actor_reconstructed:
            return
        note = _running_engine(path)
        if note is None:
            self._end_later(0.0)
            return
        PidFile(note.held, ProcessId.of(os.getpid()), note.directory).write(path)
        self._is_up = True
        self._engine = _Engine.of(AdoptedProcess(note.held), Path(note.directory))
        self._begin_watching(self._engine)

    def _begin_watching(self, engine: _Engine) -> None:
        threading.Thread(target=self._watch, args=(engine,), name="engine", daemon=True).start()

    def start(self, start: bytes, environment: dict[str, str]) -> EngineBegun:
        """Start the engine. `start` is an EngineStart in JSON."""
        import ray

        _adopt(environment)
        given = msgspec.json.decode(start, type=decodable(EngineStart))
        here = ray.util.get_node_ip_address()
        try:
            listen = parse_address(given.listen or free_address(here))
            listen = listen if given.insecure else listen.secured()
            token = TOKEN.text()
            check_may_listen(listen, token)
            advertise = given.advertise or (here if listen.is_everywhere else "")
            address = advertised(listen, advertise)
            if given.journal:
                Path(given.journal).mkdir(mode=0o700, parents=True, exist_ok=True)
                check_persisted(Path(given.journal), given.settings)
            kept = kept_environment(Path(given.authority), token) if given.authority else {}
            directory = make_directory("ray")
            settings = msgspec.structs.replace(given.settings, ray_address=ray.get_runtime_context().gcs_address)
            record = RunRecord(given.name, str(address), settings.islands, started=time.time())
            log, run = open_log(record, directory)
            with log:
                process = EngineProcess(
                    EngineOptions(
                        settings,
                        str(directory),
                        listen=str(listen),
                        advertise=advertise,
                        parent=os.getpid(),
                        cache_directory=default_cache_directory(),
                        usage_file=usage_file(given.name),
                        journal=given.journal,
                        note=str(self._note or ""),
                        run_directory=str(run.directory) if run is not None else "",
                    ),
                    output=log.fileno(),
                    environment=logging_environment() | kept,
                )
            engine = self._engine = _Engine.of(process, directory)
            if self._note is not None:
                PidFile(ProcessId.of(process.process.pid), ProcessId.of(os.getpid()), str(directory)).write(self._note)
        except (AtollError, OSError) as error:
            self._end_later()
            return EngineBegun("", {}, str(error))
        self._begin_watching(engine)
        try:
            joins = {role: str(process.join_token(role)) for role in JOINING} if listen.tls else {}
        except AtollError as error:
            return EngineBegun("", {}, str(error))
        return EngineBegun(str(address), joins, "")

    def up(self) -> Up:
        """Return when the cluster is up, or when its start has failed."""
        engine = self._started()
        assert isinstance(engine.process, EngineProcess)
        try:
            engine.process.wait_until_up(until_end=True)
            self._is_up = True
            return Up("", engine.warnings())
        except AtollError as error:
            engine.process.end()
            return Up(str(error), engine.last_messages())
        finally:
            self._start_reported.set()

    def ended(self) -> tuple[str, bool]:
        """Return the fields of `EngineEnd` when the engine has ended. If it was adopted, the reason is unknown."""
        process = self._started().process
        self._is_awaited = True
        if isinstance(process, EngineProcess):
            end = process.wait_for_end()
            return end.reason, end.expected
        process.wait()
        return "", True

    def end(self) -> None:
        """End the engine, and return when nothing of the cluster is left, in Ray or elsewhere."""
        self._started().process.end()
        if self._is_awaited:
            time.sleep(_DELIVERY_SECONDS)  # Ray delivers the result of `ended` before the caller kills this actor

    def _started(self) -> _Engine:
        assert self._engine is not None, "the engine was started"
        return self._engine

    def _watch(self, engine: _Engine) -> None:
        engine.process.wait()
        remove_tree(engine.directory)  # in case the engine was killed
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        if not self._is_up:
            self._start_reported.wait(_LINGER_SECONDS)
        self._end_later(_DELIVERY_SECONDS)

    def _end_later(self, seconds: float = _LINGER_SECONDS) -> None:
        def end() -> None:
            import ray

            with contextlib.suppress(Exception):
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

        threading.Timer(seconds, end).start()


def _running_engine(path: Path) -> PidFile | None:
    """Return the note at `path` if its engine runs, otherwise None. Raise OSError if that stays unknown."""

    def read() -> PidFile | None:
        note = PidFile.read(path)
        return note if note is not None and note.held.runs else None

    return Retry(LOOK_SECONDS, patience=_NOTE_SECONDS).call(read, OSError)


@dataclass(frozen=True)
class _Engine:
    """An engine that was started or adopted, with its directory and its open log."""

    process: EngineProcess | AdoptedProcess
    directory: Path
    log: BinaryIO

    @classmethod
    def of(cls, process: EngineProcess | AdoptedProcess, directory: Path) -> _Engine:
        # The log stays open, since the engine removes its directory before the log of a failed start is read.
        return cls(process, directory, open(directory / "log", "rb"))

    def last_messages(self) -> str:
        return "\n".join(self._text().splitlines()[-_LAST_LINES:])

    def warnings(self) -> str:
        return "\n".join(warnings_in(self._text(), _LAST_LINES))

    def _text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


class AgentWatch:
    """Kills a host agent that has not run for `seconds`; `silence` is then the reason.

    An agent checks its lease four times a second. So a process that uses no CPU time, and that the kernel never
    switches to, does not run; for example, it is stopped. The engine has given up on the agent by then, and only the
    actor can start another.
    """

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.silence = ""
        self._process = process
        self._watch = StartWatch(seconds)
        threading.Thread(target=self._run, name="atoll-agent", daemon=True).start()

    def _run(self) -> None:
        activity = ProcessActivity(self._process.pid, with_switches=True)
        while self._process.poll() is None:
            if self._watch.is_silent(time.monotonic(), activity.read(), has_spoken=False):
                self.silence = f"it did not run for {self._watch.seconds:.0f} s, and was killed"
                self._process.kill()
                return
            time.sleep(LOOK_SECONDS)


# Variables that the engine and the agents get from the environment in which the cluster was started. They are arguments
# of the actors' methods. Every user of the Ray cluster can read a runtime environment, so secrets must not be in one.
_PREFIXES = ("ATOLL_", "XLA_", "NCCL_", "LIBTPU_", "TF_CPP_")
_NAMES = ("OMP_NUM_THREADS",)
# Variables that were read where the cluster was started, and mean something else on a host.
_NOT = (
    *(each.variable for each in (ADDRESS, ISLAND, RANK, INSECURE)),
    *(SETTINGS[name].variable for name in ("islands", "engine", "mesh")),
)
_SECRETS = tuple(each.variable for each in (JOIN, TOKEN, HOST_TOKEN, AUTHORITY))


def engine_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for the engine. Of the secrets, it gets those from which its cluster is made."""
    return _chosen(environment, (TOKEN, HOST_TOKEN, AUTHORITY))


def agent_environment(secured: bool, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that the engine passes to host agents.

    Of the secrets, they get the join token that the engine has made for hosts or, without TLS, the tokens.
    """
    return _chosen(environment, (JOIN,) if secured else (TOKEN, HOST_TOKEN))


def _chosen(environment: Mapping[str, str], secrets: tuple[Setting[str], ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and name not in _NOT
        and not name.startswith("ATOLL_RAY_")
        and (name not in _SECRETS or any(name == each.variable for each in secrets))
    }
