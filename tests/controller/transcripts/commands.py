"""The commands of transcripts: they send events to a controller, and return its reaction as text."""

from __future__ import annotations

import shlex
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.errors import OK, Code, Status
from atoll.launch.shared_parts import GANG_WINDOW
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from atoll.state.session import Session
from atoll.state.tallies import counts_of
from atoll.telemetry.report import report
from tests.controller.transcripts.message_text import Names, message_text, without_versions
from tests.controller.transcripts.programs import ProgramReader
from tests.controller.transcripts.recorded_cluster import RecordedCluster
from tests.controller.transcripts.transcript_files import TranscriptError

TOKEN = "cluster"
STEP_SECONDS = 0.001  # between two commands
GANG_NS = 1_000_000
OK_LINES = ["ok"]  # the output of commands whose reaction is hidden
NOTHING = "(nothing)"
_FLOATS = ("delegate_after_seconds", "wait_seconds", "lease_seconds", "abandoned_seconds", "suspended_seconds")
_INTS = ("device_memory", "spill", "max_sessions")


@dataclass
class Command:
    """Command of a peer. The peer is "" for commands to the test itself."""

    peer: str  # "", "engine", "operator", the number of a host, or the name of a session
    name: str
    words: list[str]
    options: dict[str, str]
    lines: list[str]  # all words but the first

    @classmethod
    def parse(cls, lines: list[str]) -> Command:
        first, peer = lines[0], ""
        before, colon, after = first.partition(": ")
        if colon and all(each.isalnum() for each in before.split()):
            peer, first = before.removeprefix("host "), after
        name, *rest = shlex.split(first)
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        return cls(peer, name, [word for word in rest if "=" not in word], options, lines[1:])

    def take(self, name: str, default: str = "") -> str:
        """Return an option, and remove it."""
        return self.options.pop(name, default)

    def numbers(self, name: str, default: str = "") -> tuple[int, ...]:
        """Return an option that is a list of numbers, and remove it."""
        return tuple(int(each) for each in self.listed(name, default))

    def listed(self, name: str, default: str = "") -> list[str]:
        """Return an option that is a list, and remove it."""
        return [each for each in self.take(name, default).split(",") if each]


class Transcript:
    """Runner for the commands of one transcript.

    The methods `_do_*` are the commands. They return their output, or None for the reaction of the controller.
    """

    def __init__(self) -> None:
        self._names = Names()
        self._cluster = RecordedCluster("1x1x1")
        self._sessions: dict[str, int] = {}
        self._devices: dict[str, tuple[int, ...]] = {}  # of functions
        self._sources: dict[int, str] = {}  # functions by the feeds of their sources
        self._spills: dict[int, m.SpillRequest] = {}  # the newest run, by host
        self._runs: dict[int, m.Run] = {}  # sent runs, by their first gang
        self._clocks: Counter[int] = Counter()  # clocks in nanoseconds, by host
        self._compiles: dict[tuple[int, str], str] = {}  # compiled functions, by host and name

    def run(self, lines: list[str]) -> list[str]:
        """Run a command, and return its output."""
        command = Command.parse(lines)
        peer = {"": "", "engine": "engine_", "operator": "operator_"}.get(command.peer, "session_")
        peer = "host_" if command.peer.isdigit() else peer
        method = getattr(self, f"_do_{peer}{command.name.replace('-', '_')}", None)
        if method is None or (peer == "session_" and command.peer not in self._sessions):
            raise TranscriptError(f"there is no command {lines[0]!r}")
        self._cluster.now = round(self._cluster.now + STEP_SECONDS, 6)
        output = method(command)
        if command.options:
            raise TranscriptError(f"{command.name} has no option {', '.join(command.options)}")
        return (self._reaction() or [NOTHING]) if output is None else output

    # ---- the reaction

    def _reaction(self) -> list[str]:
        """Return what has changed and what was sent since the last call."""
        actions = self._cluster.flush()
        lines = list(self._transitions())
        for action in actions:
            match action:
                case a.Send(connection=connection, message=message) if not isinstance(message, m.Ping | m.Peers):
                    self._note(connection, message)
                    lines.append(f"-> {self._peer(connection)}: {message_text(message, self._names)}")
                case a.Log(text=text):
                    lines.append(f"log: {text}")
                case a.End():
                    lines.append("the controller ends")
        closed, self._cluster.closed = self._cluster.closed, []
        for close in closed:
            reason = f": {close.reason}" if close.reason else ""
            lines.append(f"the connection of {self._peer(close.connection)} is closed{reason}")
        return [self._text(line) for line in lines]

    def _text(self, text: str) -> str:
        return without_versions(self._names.in_text(text))

    def _note(self, connection: int, message: Any) -> None:
        _, number = self._cluster.name_of(connection)
        if isinstance(message, m.SpillRequest):
            self._spills[number] = message
        elif isinstance(message, m.Run):
            self._runs[message.sequence] = message
        elif isinstance(message, m.Compile):
            name = self._sources[message.feed]
            self._names.give("function", message.function, name)
            self._compiles[number, name] = message.function

    def _peer(self, connection: int) -> str:
        kind, number = self._cluster.name_of(connection)
        if kind == "host":
            return f"host {number}"
        if kind in ("engine", "operator"):
            return kind
        return self._names.name("session" if kind == "session" else "connection", number)

    def _transitions(self) -> Iterator[str]:
        for gang, is_new, states in self._cluster.transitions():
            launch = gang.run.launch
            session = self._names.name("session", launch.session)
            about = f" ({launch.program.name} of {session} on island {gang.island})" if is_new else ""
            yield f"gang {gang.sequence}{about}: {', '.join(states)}"

    # ---- the cluster

    def _do_cluster(self, command: Command) -> list[str]:
        """Start a cluster of ISLANDSxHOSTSxDEVICES with these settings. Each further line has a tenant.

        `window` is the number of gangs that a host may have in flight.
        """
        tenants = tuple(_tenant(line.split()) for line in command.lines)
        settings: dict[str, Any] = {"delegate_after_seconds": None, "tenants": tenants}
        for name in [*command.options]:
            value = command.take(name)
            setting = name.replace("-", "_")
            settings[setting] = float(value) if setting in _FLOATS else int(value) if setting in _INTS else value
        (topology,) = command.words
        window = int(settings.pop("window", GANG_WINDOW))
        self._cluster = RecordedCluster(topology, TOKEN if tenants else "", **settings)
        for host in range(self._cluster.topology.host_count):
            self._cluster.join(host, max_in_flight=window)
        self._cluster.flush()
        return list(self._islands())

    def _islands(self) -> Iterator[str]:
        resources = self._cluster.controller.resources
        topology = resources.topology
        for number, island in resources.islands.items():
            devices = range(topology.shapes[number].devices)
            hosts = (
                f"host {host} with device{'s' * (len(devices) > 1)} "
                + ", ".join(str(topology.number_of(host, each)) for each in devices)
                for host in topology.hosts_of(number)
            )
            yield f"island {number} is {island.state.name}: {'; '.join(hosts)}"

    def _do_connect(self, command: Command) -> None:
        """Connect the proxy of a session, with the token of a tenant if there are tenants."""
        (name,) = command.words
        cluster = self._cluster
        before = set(cluster.controller.sessions)
        token = command.take("token", command.take("tenant", cluster.token))
        connection = cluster.connect("proxy", 40 + len(self._sessions), f"{name}.py", token=token)
        self._names.give("connection", connection, name)
        for number in set(cluster.controller.sessions) - before:
            cluster.session_opened(connection, number)
            self._sessions[name] = number
            self._names.give("session", number, name)

    def _do_disconnect(self, command: Command) -> None:
        """The proxy of a session closes its connection."""
        self._cluster.close(self._sessions[command.words[0]])

    def _do_tick(self, command: Command) -> None:
        """Let seconds pass, in which all hosts but the silent ones answer."""
        (seconds,) = command.words or ["1"]
        silent = command.numbers("silent")
        for _ in range(int(seconds)):
            self._cluster.tick(round(self._cluster.now + 1.0, 6), silent)

    def _do_restart_controller(self, command: Command) -> list[str]:
        """Replace the controller by a new one that replays the journal."""
        self._cluster.restart()
        line = f"a new controller has replayed all events, and continues in term {self._cluster.term}"
        return [line, *self._reaction()]

    def _do_standby_connects(self, command: Command) -> list[str]:
        """Start a standby: a second controller that handles the same events from now on."""
        self._cluster.start_standby()
        return ["the standby has the state of the controller"]

    def _do_controller_ends(self, command: Command) -> list[str]:
        """The controller ends, and the standby takes over."""
        self._cluster.take_over()
        return [f"the standby continues in term {self._cluster.term}", *self._reaction()]

    def _do_status(self, command: Command) -> list[str]:
        """Print the islands, sessions and waits that `atoll status` shows."""
        found = report(self._cluster.controller, now=self._cluster.now)
        lines = []
        for island in found.islands:
            reason = f", {island.waits_for}" if island.waits_for else ""
            counts = f"{island.waiting} waiting, {island.in_flight} in flight"
            lines.append(f"island {island.id}: {island.state}, {counts}{reason}")
            lines += [
                f"device {device.id}: {device.used_bytes} of {device.memory_bytes} bytes in use"
                for host in island.hosts
                for device in host.devices
                if device.memory_bytes
            ]
        for each in found.sessions:
            state = f", {each.state}" if each.state else ""
            spilled = f" ({each.spilled_bytes} spilled)" if each.spilled_bytes else ""
            arrays = f"{_count(each.arrays, 'array')} of {each.bytes} bytes{spilled}"
            launches = f"{_count(each.in_flight, 'launch', 'launches')} in flight"
            lines.append(f"{self._names.name('session', each.id)}: {arrays}, {launches}{state}")
        for wait in found.waits:
            lines.append(f"{self._names.name('session', wait.session)} waits on island {wait.island}: {wait.text}")
        return [self._text(line) for line in lines]

    def _do_history(self, command: Command) -> list[str]:
        """Print the events of the cluster."""
        events = report(self._cluster.controller, now=self._cluster.now).events
        return [self._text(f"{each.kind}: {each.text}") for each in events]

    # ---- proxies

    def _session(self, command: Command) -> Session:
        return self._cluster.controller.sessions[self._sessions[command.peer]]

    def _send(self, command: Command, message: Any) -> None:
        self._cluster.proxy(self._sessions[command.peer], message)

    def _do_session_register_function(self, command: Command) -> None:
        (name,) = command.words
        devices = self._devices[name] = command.numbers("devices", "0")
        feed = self._source(command, name)
        number = self._names.number("function", name)
        content = f"content of {command.take('content', name)}"
        self._send(command, m.RegisterFunction(number, content, feed, (devices,)))

    def _source(self, command: Command, name: str) -> int:
        """Return the feed of a function's source, which the proxy sends to the hosts."""
        feed = self._names.number("feed", command.take("source", f"source-of-{name}"))
        self._sources[feed] = name
        return feed

    def _do_session_has_function(self, command: Command) -> list[str]:
        """Register a function, and compile it."""
        (name,) = command.words
        options = {each: command.take(each) for each in ("scratch", "calls") if each in command.options}
        self._do_session_register_function(command)
        locations = self._session(command).devices.locations
        for host in sorted({locations[device].host for device in self._devices[name]}):
            source = self._names.number("feed", f"source-of-{name}")
            self._cluster.worker(host, m.FeedsArrived(self._sessions[command.peer], (source,)))
            self._reaction()
            if (host, name) in self._compiles:
                self._do_host_compiled(Command(str(host), "compiled", [name], dict(options), []))
        self._reaction()
        return OK_LINES

    def _do_session_register_program(self, command: Command) -> None:
        def function(name: str) -> tuple[int, tuple[int, ...]]:
            return self._names.number("function", name), self._devices[name]

        (name,) = command.words
        program = ProgramReader(name, function).read(command.lines)
        self._send(command, m.RegisterProgram(self._names.number("program", name), program))

    def _do_session_has_program(self, command: Command) -> list[str]:
        """Register a program."""
        self._do_session_register_program(command)
        self._reaction()
        return OK_LINES

    def _do_session_has_array(self, command: Command) -> list[str]:
        """Upload arrays to a device."""
        (device,) = command.numbers("device", "0")
        program = f"upload-to-{device}"
        if self._names.number("program", program) not in self._session(command).programs:
            body = [f"x = put {device}", "return x"]
            self._do_session_register_program(Command(command.peer, "", [program], {}, body))
        host = self._session(command).devices.locations[device].host
        for name in command.words:
            feed = f"bytes-of-{name}"
            self._do_host_feeds_arrived(Command(str(host), "", [command.peer, feed], {}, []))
            self._do_session_launch(Command(command.peer, "", [program, "->", name], {"feeds": feed}, []))
            self._reaction()
            newest = max(self._cluster.controller.launches.in_flight)
            self._do_host_done(Command(str(host), "", [str(newest)], {}, []))
            self._reaction()
        return OK_LINES

    def _arrays(self, names: list[str]) -> tuple[int, ...]:
        return tuple(self._names.number("array", each) for each in names)

    def _do_session_launch(self, command: Command) -> None:
        program, *names = command.words
        at = names.index("->") if "->" in names else len(names)
        arguments, results = self._arrays(names[:at]), self._arrays(names[at + 1 :])
        feeds = tuple(self._names.number("feed", each) for each in command.listed("feeds"))
        released = self._arrays(command.listed("released"))
        number = self._names.number("program", program)
        self._send(command, m.Launch(number, arguments, results, feeds, released=released))

    def _do_session_await(self, command: Command) -> None:
        wait = self._names.number("wait", "+".join(command.words))
        self._send(command, m.Await(wait, self._arrays(command.words)))

    def _do_session_release(self, command: Command) -> None:
        self._send(command, m.Release(self._arrays(command.words)))

    def _do_session_delete(self, command: Command) -> None:
        self._send(command, m.Release(self._arrays(command.words), delete=True))

    def _do_session_quiesced(self, command: Command) -> None:
        (migration,) = command.words
        self._send(command, m.Quiesced(int(migration)))

    def _do_session_recompile(self, command: Command) -> None:
        (name,) = command.words
        feed = self._source(command, name)
        self._send(command, m.Recompile(self._names.number("function", name), feed))

    def _do_session_failure_acknowledged(self, command: Command) -> None:
        self._send(command, m.FailureAcknowledged(tuple(int(each) for each in command.words)))

    def _do_session_add_slice(self, command: Command) -> None:
        count, *kind = command.words
        self._send(command, m.AddSlice(1, SliceRequest(int(count), exclusive="exclusive" in kind)))

    def _do_session_release_slice(self, command: Command) -> None:
        (number,) = command.words
        self._send(command, m.ReleaseSlice(int(number)))

    def _do_session_register_switch(self, command: Command) -> None:
        (name,) = command.words
        number, *branches = (self._names.number("program", each) for each in (name, *command.listed("branches")))
        index = self._names.number("program", command.take("index"))
        self._send(command, m.RegisterSwitch(number, index, tuple(branches)))

    # ---- workers

    def _report(self, command: Command, message: Any) -> None:
        self._cluster.worker(int(command.peer), message)

    def _do_host_feeds_arrived(self, command: Command) -> None:
        session, *feeds = command.words
        numbers = tuple(self._names.find_given(each) or self._names.number("feed", each) for each in feeds)
        self._report(command, m.FeedsArrived(self._sessions[session], numbers))

    def _do_host_compiled(self, command: Command) -> None:
        (name,) = command.words
        error, crashed = command.take("error"), command.take("crashed")
        status = Status(Code.INTERNAL, error or crashed) if error or crashed else OK
        scratch, calls = int(command.take("scratch", "0")), bool(command.take("calls"))
        function = self._compiles.pop((int(command.peer), name))
        self._report(
            command, m.Compiled(function, status, b"", 0.1, False, scratch, calls, name, crashed=bool(crashed))
        )

    def _do_host_serves(self, command: Command) -> None:
        (world,) = command.words
        self._report(command, m.WorldServed(int(world), "unix:/world"))

    def _do_host_done(self, command: Command) -> None:
        self._report(command, m.Done(tuple(self._ended(int(command.peer), int(each)) for each in command.words)))

    def _ended(self, host: int, gang: int) -> tuple[int, int, int]:
        """Return a gang with its start and end times by the host's clock. Each gang runs for a millisecond."""
        start = self._clocks[host]
        self._clocks[host] += GANG_NS
        return gang, start, self._clocks[host]

    def _do_host_ends_all(self, command: Command) -> list[str]:
        """End the running gangs one after another, until nothing runs."""
        lines: list[str] = []
        while running := sorted(self._cluster.controller.launches.in_flight):
            self._report(command, m.Done((self._ended(int(command.peer), running[0]),)))
            lines += self._reaction()
        return lines

    def _do_host_failed(self, command: Command) -> None:
        (gang,) = command.words
        self._report(command, m.Failed(int(gang), Status(Code.INTERNAL, command.take("error"))))

    def _do_host_value(self, command: Command) -> None:
        gang, value = command.words
        self._report(command, m.ValueReported(int(gang), int(value)))

    def _do_host_spilled(self, command: Command) -> None:
        """Answer the newest SpillRequest: the host has copied all shards."""
        request = self._spills[int(command.peer)]
        pieces = tuple(m.SpilledPiece(number, 8) for number, _, _ in request.shards)
        self._report(command, m.SpillReply(request.session, request.request, OK, pieces))

    def _do_host_runs_revoked(self, command: Command) -> None:
        """Answer RevokeRuns, with the number of segments of each run that have started, as GANG:SEGMENTS."""
        session, *runs = command.words
        started = tuple((int(gang), int(segments)) for gang, segments in (each.split(":") for each in runs))
        self._report(command, m.RunsRevoked(self._sessions[session], started))

    def _do_host_progress(self, command: Command) -> None:
        """Report that segments FIRST-LAST of a delegated run have ended. With `over`, the run does not continue."""
        gang, segments, *over = command.words
        first, _, last = segments.partition("-")
        ended = range(int(first), int(last or first) + 1)
        times = [number for segment in ended for number in (10 * segment + 1, 10 * segment + 11)]
        took = [10 for _ in ended]
        samples = tuple((each, 10) for each in self._runs[int(gang)].sampled if each in ended)
        counted = m.GangsEnded(sum(took), times[0], 0, times[-1], tuple(counts_of(took)), samples)
        packed = struct.pack(f"<{len(times)}q", *times)
        self._report(command, m.RunProgress(int(gang), int(first), packed, counted, bool(over)))

    def _do_host_joins(self, command: Command) -> None:
        """Let a worker join that was restarted or belongs to a new island."""
        host = int(command.peer)
        known = self._cluster.controller.resources.hosts.get(host)
        self._cluster.join(host, f"unix:/data-{host}-again", 1000 + (0 if known is None else known.incarnation))

    def _do_host_lost(self, command: Command) -> None:
        """Lose the connection of a worker, without a reason from the engine in time."""
        self._cluster.lose(int(command.peer), " ".join(command.words))

    # ---- the engine and operators

    def _do_engine_worker_ended(self, command: Command) -> None:
        (host,) = command.numbers("host")
        (status,) = command.numbers("status")
        incarnation = self._cluster.controller.resources.hosts[host].incarnation
        self._cluster.engine(m.WorkerEnded(host, incarnation, status, " ".join(command.words)))

    def _do_engine_island_removed(self, command: Command) -> None:
        island, *reason = command.words
        self._cluster.engine(m.IslandNotRestarted(int(island), " ".join(reason)))

    def _do_engine_island_ended(self, command: Command) -> None:
        (island,) = command.words
        self._cluster.engine(m.IslandEnded(int(island)))

    def _request(self, command: Command, message: Any) -> None:
        """Send a request of an operator, or with `as`, of a tenant's user."""
        tenant = command.take("as")
        if not tenant:
            self._cluster.operator(message)
            return
        connection = self._cluster.connect("operator", token=tenant)
        self._names.give("connection", connection, f"operator {tenant}")
        self._cluster.receive(connection, message)

    def _do_operator_suspend(self, command: Command) -> None:
        name, *to = command.words
        self._request(command, m.SuspendRequest(self._sessions[name], "disk" in to))

    def _do_operator_resume(self, command: Command) -> None:
        (name,) = command.words
        islands, wait = command.numbers("islands"), float(command.take("wait", "0"))
        self._request(command, m.ResumeRequest(self._sessions[name], islands, wait))

    def _do_operator_migrate(self, command: Command) -> None:
        (name,) = command.words
        (number,), (island,) = command.numbers("slice"), command.numbers("island")
        self._request(command, m.RemapRequest(self._sessions[name], number, island))

    def _do_operator_drain(self, command: Command) -> None:
        (island,) = command.words
        self._request(command, m.DrainRequest(int(island)))

    def _do_operator_add_island(self, command: Command) -> None:
        self._request(command, m.AddIslandRequest())

    def _do_operator_end_session(self, command: Command) -> None:
        (name,) = command.words
        self._request(command, m.EndSessionRequest(self._sessions[name]))


def _count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _tenant(words: list[str]) -> TenantSettings:
    """Parse `tenant NAME LIMIT=VALUE ...`. The token of the tenant is its name."""
    _, name, *limits = words
    settings = {"name": name, "token_hash": token_hash(name), **dict(each.split("=") for each in limits)}
    return msgspec.convert(settings, TenantSettings, strict=False)


def runner() -> Callable[[list[str]], list[str]]:
    """Return a function that runs the commands of one transcript."""
    return Transcript().run
