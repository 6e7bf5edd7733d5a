"""Random clients and their world: a controller with model hosts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from typing import Any

from atoll.cluster.locations import HostDevice
from atoll.errors import OK, Status
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Program,
    Transfer,
    single,
)
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.state.compiled_functions import hosts_of
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun
from atoll.worker.delegated_run_dispatcher import DelegatedRunDispatcher, DelegatedUnits
from atoll.worker.host_group import HostGroup
from tests.controller.model_host import ModelHost
from tests.controller.play import Cluster, joined, joining


class Client:
    """Session that acts at random, and knows the possible outcomes of each of its handles."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.rng = world.rng
        self.number = number
        self.next = 1
        self.launched = self.retired = 0
        self.arrays: dict[int, ArraySpec] = {}  # live and usable
        self.taint: dict[int, set[str]] = {}  # programs that fail and cause the array to fail
        self.maybe: dict[int, set[str]] = {}  # programs that may cause it to fail
        self.unreleased: set[int] = set()
        self.waits: dict[int, int] = {}  # wait -> handle
        self.outcomes: dict[int, Status] = {}
        self.programs: dict[Any, int] = {}
        self.functions: dict[tuple[int, ...], int] = {}
        self.uploads: list[tuple[int, int]] = []  # (host, feed)
        self.sent: list[tuple[int, int]] = []  # uploaded feeds of launches
        self.fed: set[int] = set()  # feeds of launches
        self.lost: set[int] = set()  # hosts to which it sends nothing

    def fresh(self) -> int:
        self.next += 1
        return self.next

    def send(self, message: Any) -> None:
        self.world.cluster.proxy(self.number, message)

    def handle(self, message: Any) -> None:
        match message:
            case m.CreditReturned(launches=launches):
                self.retired += launches
            case m.HostsFailed(hosts=hosts):
                self.lost.update(hosts)
                lost = [each for each in self.uploads + self.sent if each[0] in hosts]
                gone = {feed for _, feed in lost if feed not in self.fed or self.rng.random() < 0.2}
                unsent = {feed for _, feed in self.uploads if feed in self.fed - gone and self.rng.random() < 0.5}
                again = [each for each in lost if each[1] not in gone]
                self.uploads = [each for each in self.uploads if each[0] not in hosts] + again
                self.sent = [each for each in self.sent if each[0] not in hosts]
                named = tuple(each for each in again if each[1] not in unsent)
                self.send(m.FailureAcknowledged(hosts, named, tuple(sorted(unsent))))
            case m.HostsRestarted(hosts=addresses):
                back = {host for host, _ in addresses}
                self.lost -= back
                locations = self.world.controller.sessions[self.number].devices.locations
                for devices, function in self.functions.items():
                    hosts = sorted({locations[device].host for device in devices} & back)
                    if hosts:
                        feed = self.fresh()
                        self.send(m.Recompile(function, feed))
                        self.uploads.extend((host, feed) for host in hosts)
            case m.Awaited(wait=wait, status=status):
                assert wait not in self.outcomes, "each wait is answered once"
                self.outcomes[wait] = status

    def spec(self) -> ArraySpec:
        """Return a sharding over some devices of the cluster."""
        locations = self.world.controller.sessions[self.number].devices.locations
        devices = tuple(self.rng.sample(sorted(locations), self.rng.randint(1, min(3, len(locations)))))
        tiling = Tiled((len(devices),), tuple(range(len(devices))))
        return ArraySpec("float32", (6,), Sharding(devices, tiling))

    def island_spec(self) -> ArraySpec:
        number = self.rng.randrange(self.world.controller.resources.topology.islands)
        locations = self.world.controller.sessions[self.number].devices.locations
        islands = sorted({location.island for location in locations.values()})  # without those that were removed before
        island = islands[number % len(islands)]
        devices = [d for d, location in locations.items() if location.island == island]
        chosen = tuple(self.rng.sample(devices, self.rng.randint(1, len(devices))))
        return ArraySpec("float32", (6,), Sharding(chosen, Tiled((len(chosen),), tuple(range(len(chosen))))))

    def program(self, body: Program) -> int:
        if body not in self.programs:
            number = self.programs[body] = self.fresh()
            self.send(m.RegisterProgram(number, body))
        return self.programs[body]

    def name(self, kind: str) -> str:
        return f"{kind} doomed {self.fresh()}" if self.rng.random() < self.world.doom else kind

    def launch(
        self,
        body: Program,
        arguments: tuple[int, ...],
        feeds: tuple[int, ...] = (),
        contents: bytes | None = None,
    ) -> list[int]:
        number = self.program(body)
        results = [self.fresh() for _ in body.results]
        taint = set().union(*(self.taint[handle] for handle in arguments))
        # A program of several nodes may fail if other sessions use the results that it had made so far.
        late = {name for name in taint if name.startswith("chain")}
        maybe = late.union(*(self.maybe[handle] for handle in arguments))
        taint = taint - late
        if "doomed" in body.name:
            taint = taint | {body.name}
        self.send(m.Launch(number, arguments, tuple(results), feeds, contents=contents))
        self.launched += 1
        for handle in results:
            self.taint[handle], self.maybe[handle] = taint, maybe
            self.unreleased.add(handle)
        if "doomed" in body.name or self.rng.random() < 0.1:
            self.send(m.ReleaseProgram(self.programs.pop(body)))
        return results

    def some_array(self) -> int | None:
        return self.rng.choice(sorted(self.arrays)) if self.arrays else None

    def put(self) -> None:
        spec = self.spec()
        body = single(self.name("put"), (), HostToDevice((HostBuffer(0, (6,), None, None),), (spec,)), feeds=1)
        feed = self.fresh()
        if self.rng.random() < 0.3:
            (handle,) = self.launch(body, (), (feed,), bytes(24))
            self.arrays[handle] = spec
            return
        self.fed.add(feed)
        locations = self.world.controller.sessions[self.number].devices.locations
        self.uploads.extend((host, feed) for host in {locations[d].host for d in spec.sharding.devices})
        (handle,) = self.launch(body, (), (feed,))
        self.arrays[handle] = spec

    def transfer(self) -> None:
        handle = self.some_array()
        if handle is None:
            return
        source, target = self.arrays[handle], self.spec()
        donate = self.rng.random() < 0.2
        body = single(self.name("transfer"), (source,), Transfer((0,), (target,), donate, reshard=True))
        (result,) = self.launch(body, (handle,))
        if donate:
            del self.arrays[handle]
        self.arrays[result] = target

    def has_function(self, devices: tuple[int, ...]) -> bool:
        """Return whether a function for these devices is compiled, or can be compiled."""
        locations = self.world.controller.sessions[self.number].devices.locations
        return devices in self.functions or locations[devices[0]].island not in self.world.down

    def function(self, devices: tuple[int, ...]) -> int:
        """Return a compiled function for these devices."""
        while devices not in self.functions:  # a compilation may fail
            function, feed = self.fresh(), self.fresh()
            self.functions[devices] = function
            self.send(m.RegisterFunction(function, "content", feed, (devices,)))
            self.world.compile(self.number, function, feed)
        return self.functions[devices]

    def chain(self) -> None:
        """Return a program of several nodes that call functions on values of earlier nodes, with transfers where
        necessary.
        """
        handle = self.some_array()
        if handle is None:
            return
        specs = [self.arrays[handle]]
        nodes: list[Any] = []
        gone: set[int] = set()  # donated values

        def donate(value: int) -> bool:
            if self.rng.random() < 0.3:
                gone.add(value)
            return value in gone

        for _ in range(self.rng.randint(2, self.world.longest)):
            target = self.island_spec()
            if not self.has_function(target.sharding.devices):
                continue
            value = self.rng.choice([i for i in range(len(specs)) if i not in gone])
            if specs[value] != target:
                nodes.append(Transfer((value,), (target,), donate(value), reshard=True))
                value = len(specs)
                specs.append(target)
            devices = target.sharding.devices
            donated = (0,) if donate(value) else ()
            nodes.append(Call(self.function(devices), (value,), (target,), devices, donated))
            specs.append(target)
        left = [value for value in range(1, len(specs)) if value not in gone]
        if not left:
            return
        results = tuple(sorted(self.rng.sample(left, min(len(left), self.rng.randint(1, 2)))))
        found = self.launch(Program(self.name("chain"), (specs[0],), tuple(nodes), results), (handle,))
        if 0 in gone:
            del self.arrays[handle]
        self.arrays.update((result, specs[value]) for result, value in zip(found, results, strict=True))

    def call(self) -> None:
        spec = self.island_spec()
        devices = spec.sharding.devices
        if not self.has_function(devices):
            return
        fitting = [h for h, s in self.arrays.items() if s == spec]
        arguments = tuple(self.rng.choices(fitting, k=self.rng.randint(0, 2))) if fitting else ()
        call = Call(
            self.function(devices),
            tuple(range(len(arguments))),
            (spec, spec),
            devices,
            completion=self.rng.random() < 0.3,
        )
        results = self.launch(single(self.name("call"), (spec,) * len(arguments), call), arguments)
        self.arrays.update((result, spec) for result in results[:2])

    def get(self) -> None:
        whole = [h for h, s in self.arrays.items() if len(s.sharding.devices) == 1]
        if whole:
            handle = self.rng.choice(whole)
            body = single(self.name("get"), (self.arrays[handle],), DeviceToHost((0,), 0, None), feeds=1)
            (completion,) = self.launch(body, (handle,), (self.fresh(),))
            self.wait(completion)
            self.release(completion)

    def wait(self, handle: int | None = None) -> None:
        if handle is None and self.unreleased:
            handle = self.rng.choice(sorted(self.unreleased))
        if handle is not None:
            number = self.fresh()
            self.waits[number] = handle
            self.send(m.Await(number, (handle,)))

    def release(self, handle: int | None = None) -> None:
        if handle is None and self.unreleased:
            handle = self.rng.choice(sorted(self.unreleased))
        if handle is not None:
            self.unreleased.remove(handle)
            self.arrays.pop(handle, None)
            self.send(m.Release((handle,)))

    def upload(self) -> None:
        there = [upload for upload in self.uploads if upload[0] not in self.lost]
        if there:
            host, feed = self.rng.choice(there)
            self.uploads.remove((host, feed))
            if feed in self.fed:
                self.sent.append((host, feed))
            self.world.cluster.worker(host, m.FeedsArrived(self.number, (feed,)))

    def act(self) -> None:
        self.rng.choice(
            [self.put, self.transfer, self.chain, self.chain, self.call, self.call, self.get, self.wait, self.release]
            + [self.upload] * 4
        )()


class World:
    """Controller with model hosts and random clients. The messages between them keep their order."""

    kind_of_client: type[Client] = Client
    kind_of_cluster: type[Cluster] = Cluster
    longest = 6  # maximum number of calls in a program
    removal = 0.0  # probability that an island that fails is removed, unless it is the last one

    def __init__(self, rng: random.Random, topology: str, doom: float, **settings: Any) -> None:
        self.rng = rng
        self.doom = doom
        self.now = 0.0
        self.cluster = joined(topology, self.kind_of_cluster, delegate_after_seconds=0.0, **settings)  # no time passes
        self.controller = self.cluster.controller
        self.memory: int = settings.get("device_memory", 0)  # of each device; 0 means no limit
        self.exhausted: set[str] = set()  # out-of-memory errors that the model confirms
        self._hopeless = self.controller.launches.reservations.waits.hopeless
        self.controller.launches.reservations.waits.hopeless = self.hopeless  # type: ignore[method-assign]
        self.down: set[int] = set()  # islands
        self.removed: set[int] = set()  # those of them that do not restart
        self.replies: list[m.OperationReply] = []  # to operators
        self.has_lost = False
        self.hosts = {number: self.host_of(number) for number in self.controller.resources.hosts}
        self.clients: dict[int, Client] = {}
        self.links: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # between hosts of a group
        self.delegated: dict[int, DelegatedUnits] = {}  # the worker's own class, by host
        self.groups = {number: self.group_of(number) for number in self.hosts}
        for kind, number, message in joining(self.cluster):
            assert kind == "host"
            self.groups[number].take(message)

    def host_of(self, number: int) -> ModelHost:
        """Return a model host that has just started."""
        return ModelHost(number)

    def group_of(self, number: int) -> HostGroup:
        """Return the worker's own `HostGroup`, connected to the model host."""

        def handle(message: Any) -> bool:
            dispatcher.handle(message)
            return True

        def report(*messages: Any) -> None:
            for message in messages:
                self.cluster.worker(number, message)

        group = HostGroup(number, handle, lambda to, content: self.links[number, to].append(content), report)
        host = self.hosts[number]
        delegated = self.delegated[number] = DelegatedUnits(group.report, lambda ended: dispatcher.handle(ended))
        dispatcher = DelegatedRunDispatcher(delegated, host.take, host.await_feeds, host.now)
        return group

    def hopeless(self, releasing: bool = False) -> list[tuple[Gang[GangRun], Status]]:
        """Return the launches that the controller fails for lack of memory, after checking each against the model."""
        found = self._hopeless(releasing)
        for gang, status in found:
            assert not self.fits(gang), f"{status.message}, though it would fit"
            self.exhausted.add(status.message)
        return found

    def fits(self, gang: Gang[GangRun]) -> bool:
        """Return whether the gang would fit into memory, now or after the running gangs of its island have ended.

        This uses the live buffers, not the controller's sums. The gang allocates all of its outputs.
        """
        spec, in_flight = gang.run.spec, self.controller.launches.in_flight.values()
        needed = Counter[HostDevice]()
        for requirement in (spec.scratch, *(made.requirement for made in spec.makes if not made.views)):
            needed.update(dict(requirement))
        if max(needed.values(), default=0) > self.memory:
            return False  # it never fits
        if any(each.island == gang.island for each in in_flight):
            return True
        sessions = self.controller.sessions.values()
        waiting = (
            node
            for island in sorted(self.controller.resources.islands)
            for node in self.controller.scheduler.nodes(island)
        )
        runs = [each.run for each in in_flight] + [each.run for node in waiting for each in node.gangs]
        entries = [entry for session in sessions for entry in session.directory.entries.values()]
        entries += [entry for run in runs for entry in run.launch.entries]
        blocks = {id(block): block for entry in entries for block in entry.blocks}
        blocks.update((id(block), block) for run in runs for block in run.blocks)
        held = Counter[HostDevice]()
        for block in blocks.values():
            held.update(dict(block.requirement))
        return all(held[device] + nbytes <= self.memory for device, nbytes in needed.items())

    def open(self) -> Client:
        number = self.cluster.open(1, "").number
        client = self.clients[number] = self.kind_of_client(self, number)
        self.deliver()
        return client

    def compile(self, session: int, function: int, feed: int) -> None:
        """Deliver the source of a function to its hosts, which compile it at once."""
        functions = self.controller.sessions[session].functions
        while function not in functions:  # its registration waits for earlier messages of the session
            self.deliver()
        name = functions[function]
        for host in sorted(hosts_of(self.controller.functions.locations[name])):
            self.cluster.worker(host, m.FeedsArrived(session, (feed,)))
            self.cluster.worker(host, m.Compiled(name, OK, b"", 0.0, False))
            self.hosts[host].reported.add(name)

    def deliver(self) -> None:
        while (sent := self.cluster.sent()) or self.pass_on():
            for (kind, number), message in sent:
                while self.rng.random() < 0.5 and self.pass_on():
                    """Deliver messages between hosts with random delays."""
                if kind == "host":
                    if self.controller.resources.hosts[number].island not in self.down:
                        self.groups[number].take(message)
                elif kind == "session" and number in self.clients:
                    self.clients[number].handle(message)
                elif kind == "operator":
                    self.replies.append(message)
                elif kind == "engine":
                    self.ask_engine(message)

    def ask_engine(self, message: Any) -> None:
        """Handle a message to the engine."""
        if isinstance(message, m.RestartIsland):
            self.end(message.island)

    def pass_on(self) -> bool:
        """Deliver one message from a host of a group to another host. Return whether there was one."""
        busy = sorted(link for link, messages in self.links.items() if messages)
        if busy:
            link = self.rng.choice(busy)
            self.groups[link[1]].receive(self.links[link].popleft())
        return bool(busy)

    def lose(self, island: int) -> None:
        self.end(island)
        self.cluster.lose(self.rng.choice(self.controller.resources.hosts_of(island)), "killed")
        self.deliver()
        if (
            self.removal
            and self.rng.random() < self.removal
            and len(self.removed) + 1 < len(self.controller.resources.islands)
        ):
            self.removed.add(island)
            self.cluster.engine(m.IslandNotRestarted(island, "it failed too often"))
            self.deliver()

    def end(self, island: int) -> None:
        """Remove all state of the island's hosts, and all messages from and to them."""
        self.down.add(island)
        self.has_lost = True
        hosts = list(self.controller.resources.hosts_of(island))
        for host in hosts:
            self.hosts[host] = self.host_of(host)
            self.groups[host] = self.group_of(host)
            for link in [link for link in self.links if host in link]:
                del self.links[link]
        for other in self.hosts.values():
            other.returning = [send for send in other.returning if send[0] not in hosts]
            other.sends = [send for send in other.sends if send[0] not in hosts]

    def restore(self, island: int) -> None:
        self.down.discard(island)
        for host in self.controller.resources.hosts_of(island):
            self.cluster.join(host, f"unix:/data-{host}-again", 2000 + host)
        self.deliver()

    def working_hosts(self) -> list[ModelHost]:
        """Return the hosts whose islands were not removed."""
        islands = self.controller.resources.topology
        return [host for number, host in self.hosts.items() if islands.island_of(number) not in self.removed]

    def ended(self, host: ModelHost) -> list[int]:
        """Return the indices of runs that can end on this host now. The other runs wait for other hosts to begin."""
        in_flight = self.controller.launches.in_flight
        found = []
        for index, (sequence, problem) in enumerate(host.running):
            gang = in_flight.get(sequence)
            collective = gang is not None and problem is None and sequence in host.begun
            if not collective or all(sequence in self.hosts[other].begun for other in gang.run.spec.hosts):
                found.append(index)
        return found

    def work(self) -> bool:
        """Let one host end a run or receive a piece. Return False if there was no work."""
        ended = {host.number: self.ended(host) for host in self.hosts.values()}
        busy = [h for h in self.hosts.values() if ended[h.number] or h.has_news]
        if not busy:
            return False
        host = self.rng.choice(busy)
        if host.enqueued:
            self.groups[host.number].report(m.Enqueued(host.enqueued.popleft()))
        elif host.copied:
            self.groups[host.number].report(host.copied.pop(0))
        elif host.returning:
            to, session, feed = host.returning.pop(self.rng.randrange(len(host.returning)))
            if session in self.hosts[to].stores:
                self.groups[to].report(m.FeedsArrived(session, (feed,)))
        elif host.compiled:
            self.groups[host.number].report(m.Compiled(host.compiled.pop(), OK, b"", 0.0, False))
        elif host.numbers and (not ended[host.number] or self.rng.random() < 0.7):  # a relay may be faster
            self.groups[host.number].report(m.ValueReported(host.numbers.pop(0), self.rng.randint(-1, 3)))
        elif host.sends and (not ended[host.number] or self.rng.random() < 0.5):
            to, session, feed = host.sends.pop(self.rng.randrange(len(host.sends)))
            self.hosts[to].arrive(session, feed)
        else:
            message = host.finish(self.rng.choice(ended[host.number]))
            self.delegated[host.number].report(message)
        self.deliver()
        return True

    def close(self, client: Client) -> None:
        del self.clients[client.number]
        self.cluster.close(client.number)
        self.deliver()

    def settle(self) -> None:
        """Finish all uploads, restore all islands, and do all work."""
        for _ in range(1000):
            for island in sorted(self.down - self.removed):
                self.restore(island)
            for client in self.clients.values():
                while any(host not in client.lost for host, _ in client.uploads):
                    client.upload()
            self.deliver()
            while self.work():
                pass
            # Gangs that wait for memory in vain, or failed on several hosts, get their errors when no other work is
            # left.
            statistics = [self.controller.scheduler.statistics(i) for i in self.controller.resources.islands]
            if self.down == self.removed and not any(each.waiting or each.in_flight for each in statistics):
                return
            self.now += 1
            self.cluster.tick(self.now)
            for group in self.groups.values():
                group.take(m.Ping(10.0))
            self.deliver()
        raise AssertionError("something waits for ever")
