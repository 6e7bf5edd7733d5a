"""Random clients that publish arrays and read published arrays, and their world."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from atoll.controller.named_arrays.vaults import spec_of
from atoll.errors import Code
from atoll.ir.program import Mapping, Program, Rearrange, consumes, single
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SHARED_HANDLES
from tests.controller.migrating_world import MigratingClient, MigratingWorld
from tests.controller.model_host import ModelHost
from tests.controller.world import Client, World

_LATE = (Code.CANCELLED, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED, Code.INTERNAL)


class PublishingClient(MigratingClient):
    """Client that also publishes its arrays, and reads versions of any client."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.asked: set[int] = set()  # numbers of requests
        self.opened: dict[int, m.VersionOpened] = {}  # by reader
        self.late: set[int] = set()  # results of launches that may be deferred
        self.read_late: set[int] = set()  # arrays that such launches read

    def handle(self, message: Any) -> None:
        match message:
            case m.Published(request=request):
                self.asked.remove(request)
            case m.VersionOpened(request=request, status=status):
                self.asked.remove(request)
                if status.ok:
                    self.opened[message.reader] = message
            case _:
                super().handle(message)

    def launch(
        self,
        body: Program,
        arguments: tuple[int, ...],
        feeds: tuple[int, ...] = (),
        contents: bytes | None = None,
    ) -> list[int]:
        results = super().launch(body, arguments, feeds, contents)
        consumed = {value for node in body.nodes for value in consumes(node)}
        donated = {handle for value, handle in enumerate(arguments) if value in consumed}
        if self.late.intersection(arguments) or donated & self.read_late:
            self.late.update(results)
            self.read_late.update(arguments)
        return results

    def publish(self) -> None:
        chosen = self.rng.sample(sorted(self.arrays), min(len(self.arrays), self.rng.randint(1, 3)))
        if not chosen:
            return
        specs = tuple(self.arrays[handle] for handle in chosen)
        whole = [(0, len(spec.sharding.devices), 1) for spec in specs]
        mappings = tuple(Mapping(i, i, each, each) for i, each in enumerate(whole))
        body = single(self.name("publish"), specs, Rearrange(tuple(range(len(specs))), specs, mappings))
        views = self.launch(body, tuple(chosen))
        self.unreleased.difference_update(views)  # they belong to the controller
        request = self.fresh()
        self.asked.add(request)
        name = self.rng.choice("ab")
        paths = tuple(map(str, chosen))
        replicas = self.rng.randint(1, len(self.world.controller.resources.islands))
        keep = self.rng.randint(1, 2)
        on_disk = bool(self.world.spilling) and self.rng.random() < self.world.spilling
        self.send(m.Publish(request, name, keep, tuple(views), paths, replicas=replicas, on_disk=on_disk))

    def open_version(self) -> None:
        request = self.fresh()
        self.asked.add(request)
        number = self.rng.choice((-1, -1, self.rng.randint(1, 4)))
        newer = self.rng.randint(0, 3)
        self.send(m.OpenVersion(request, self.rng.choice("ab"), number, newer, self.rng.choice((0.0, 1.0))))

    def read(self) -> None:
        if not self.opened:
            return
        version = self.opened[self.rng.choice(sorted(self.opened))]
        targets = tuple(replace(self.spec(), dtype=each.dtype, shape=each.shape) for each in version.arrays)
        results = tuple(self.fresh() for _ in targets)
        self.send(m.ReadVersion(version.reader, 0, targets, results))
        for result, spec in zip(results, targets, strict=True):
            self.taint[result], self.maybe[result] = set(), {"lost"}
            self.unreleased.add(result)
            self.late.add(result)
            self.arrays[result] = spec

    def close_version(self) -> None:
        if self.opened:
            self.send(m.CloseVersion(self.opened.pop(self.rng.choice(sorted(self.opened))).reader))

    def act(self) -> None:
        if self.held or self.rng.random() >= self.world.publishing:
            super().act()
            return
        self.rng.choice((self.publish, self.open_version, *[self.read] * self.world.reading, self.close_version))()


class PublishingWorld(MigratingWorld):
    """A world whose published arrays are checked after each step."""

    kind_of_client = PublishingClient
    publishing = 0.4  # probability that an action of a client publishes or reads
    reading = 1  # how many times more probable a read is than a publication
    spilling = 0.0  # probability that a version is also written to files
    copy_loss = 0.0  # probability that an island fails before a step of the hosts while arrays are being copied

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.files: dict[int, int] = {}  # shared by all hosts
        super().__init__(*arguments, **options)

    def host_of(self, number: int) -> ModelHost:
        """Return a model host on the only machine of this world, which stores the files."""
        made = super().host_of(number)
        made.files = self.files
        return made

    def work(self) -> bool:
        copies = self.controller.published.copies
        islands = sorted(set(self.controller.resources.islands) - self.down)
        if self.copy_loss and copies.running and len(islands) > 1 and self.rng.random() < self.copy_loss:
            self.lose(self.rng.choice(islands))
        return super().work()

    def deliver(self) -> None:
        super().deliver()
        self.controller.published.names.validate()
        self.controller.published.reads.validate()
        self.check_vaults()

    def check_vaults(self) -> None:
        """Check that vaults hold only the arrays of versions, their copies, and copies in progress."""
        published = self.controller.published
        held: dict[int, list[int]] = {}
        for run in published.copies.running.values():
            held.setdefault(run.vault, []).extend(run.results)
        for restoration in published.files._restorations.values():
            held.setdefault(restoration.vault, []).extend(restoration.held)
        for version in published.names.versions():
            if version.error is not None or not version.held:
                assert version.devices == version.copies == {}
                continue
            vault = self.controller.vaults.of(version)
            handles = [*version.held, *(each for some in version.copies.values() for each in some)]
            held.setdefault(vault.number, []).extend(handles)
            entries = [vault.directory.entries[handle] for handle in handles]
            assert all(entry.error is None for entry in entries), "lost copies are replaced"
            counts = Counter(device for entry in entries for device in spec_of(entry).sharding.devices)
            assert counts == version.devices
        for number in self.controller.vaults.by_tenant.values():
            entries = self.controller.sessions[number].directory.entries
            unreleased = [handle for handle, entry in sorted(entries.items()) if not entry.released]
            assert sorted(held.get(number, [])) == unreleased

    def deferred_launches(self) -> set[tuple[int, int]]:
        """Return the results of launches that may be deferred.

        These launches need arrays of versions, read such arrays, or belong to sessions that have ended. Or they consume
        an array that an earlier launch reads which may be deferred, or need a result of such a launch.
        """
        found = set()
        for session, result in (each for host in self.hosts.values() for each in host.launches):
            client = self.clients.get(session)
            assert client is None or isinstance(client, PublishingClient)
            if client is None or result in SHARED_HANDLES or result in client.late:
                found.add((session, result))
        return found

    def end_publishing(self) -> None:
        """Let all readers leave, and remove all names. Check that nothing is left."""
        clients: list[Client] = list(self.clients.values())
        for client in clients:
            assert isinstance(client, PublishingClient)
            for reader in client.opened:
                client.send(m.CloseVersion(reader))
        published = self.controller.published
        self.now += 100
        self.cluster.tick(self.now)
        for name in list(published.names.names.values()):
            if name.versions:
                published.remove(name.tenant, name.name)
        self.deliver()
        for client in clients:
            assert isinstance(client, PublishingClient)
            assert client.asked == set(), "each request is answered"
        assert self.files == {}, "all files are removed"
        assert published.files._stored == published.files._bytes == published.files._directories == {}
        assert published.reads.is_idle, "all reads end and leave nothing"
        assert [each.state for each in published.names.versions() if each.state is not VersionState.FREED] == []
        for vault in self.controller.vaults.by_tenant.values():
            assert self.controller.sessions[vault].directory.entries == {}
            for host in self.hosts.values():
                assert host.stores.pop(vault) == {}, "all memory of published arrays is released"
