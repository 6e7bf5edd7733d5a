"""Random clients whose slices migrate, and their world."""

from __future__ import annotations

from typing import Any

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.state.session_states import SessionState
from tests.controller.world import Client, World


class MigratingClient(Client):
    """Client that also adds and releases slices, and is quiet while the controller moves it."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.held = False
        self.slices: list[int] = []

    @property
    def locations(self) -> dict[int, DeviceLocation]:
        return self.world.controller.sessions[self.number].devices.locations

    def apart(self) -> list[int]:
        """Return virtual devices that are each on a different physical device."""
        return sorted({location: device for device, location in sorted(self.locations.items(), reverse=True)}.values())

    def spec(self) -> Any:
        devices = self.apart()
        chosen = tuple(self.rng.sample(devices, self.rng.randint(1, min(3, len(devices)))))
        return self._spec(chosen)

    def island_spec(self) -> Any:
        islands = sorted({location.island for location in self.locations.values()})
        island = self.rng.choice(islands)
        devices = [device for device in self.apart() if self.locations[device].island == island]
        return self._spec(tuple(self.rng.sample(devices, self.rng.randint(1, len(devices)))))

    def _spec(self, devices: tuple[int, ...]) -> Any:
        spec = super().spec()
        tiling = type(spec.sharding.tiling)((len(devices),), tuple(range(len(devices))))
        return type(spec)("float32", (6,), type(spec.sharding)(devices, tiling))

    def handle(self, message: Any) -> None:
        match message:
            case m.Quiesce(migration=migration):
                assert not self.held
                self.held = True
                self.send(m.Quiesced(migration))
            case m.Migrated(hosts=hosts):
                assert self.held
                self.held = False
                assert all(self.locations[device].host == host for device, host in hosts)
            case m.SendSources(functions=functions):
                for function, hosts in functions:
                    feed = self.fresh()
                    self.uploads.extend((host, feed) for host in hosts)
                    self.send(m.Recompile(function, feed))
            case m.SliceAdded(status=status, slice=number):
                if status.ok:
                    self.slices.append(number)
            case m.FunctionReady(status=status):
                assert status.ok or self.may_fail(status), status
        super().handle(message)

    def may_fail(self, status: Status) -> bool:
        """Return whether the compilation of a function may fail with this error."""
        return False

    def act(self) -> None:
        if self.held:
            self.upload()
        elif self.rng.random() < 0.08:
            self.send(m.AddSlice(self.fresh(), SliceRequest(self.rng.randint(1, 2))))
        elif self.rng.random() < 0.02 and self.slices:
            self.send(m.ReleaseSlice(self.slices.pop(self.rng.randrange(len(self.slices)))))
        else:
            super().act()


class MigratingWorld(World):
    """World with an operator who moves slices."""

    kind_of_client = MigratingClient
    shares = False  # whether sessions may move to islands where they have other devices

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked = 0

    def move(self) -> None:
        client = self.rng.choice(list(self.clients.values()))
        assert isinstance(client, MigratingClient)
        if client.slices:
            island = self.rng.choice(list(self.controller.resources.islands))
            ask = m.RemapRequest(client.number, self.rng.choice(client.slices), island)
            self.ask(ask)

    def suspend(self) -> None:
        """Suspend a session, or resume it, possibly on other islands."""
        client = self.rng.choice(list(self.clients.values()))
        if client.number in self.controller.suspensions.by_session:
            some = tuple(self.rng.sample(list(self.controller.resources.islands), self.rng.randint(0, 1)))
            self.ask(m.ResumeRequest(client.number, some, self.rng.choice([0.0, 5.0])))
        else:
            self.ask(m.SuspendRequest(client.number))

    def ask(self, message: Any) -> None:
        self.cluster.operator(message)
        self.asked += 1
        self.deliver()

    def settle(self) -> None:
        """Also resume all suspended sessions, and finish all work."""
        super().settle()
        suspensions = self.controller.suspensions.by_session
        rounds = 0
        while self.controller.migrations.under_way or suspensions:
            rounds += 1
            if rounds > 400:  # the resumption waits in vain, because other sessions no longer release memory
                for number in list(suspensions):
                    self.close(self.clients[number])
            for number in list(suspensions):
                if suspensions[number].session.state is SessionState.SUSPENDED:
                    self.ask(m.ResumeRequest(number, (), 1000.0))
            self.now += 1
            self.cluster.tick(self.now)
            self.deliver()
            super().settle()


def check_that_nothing_was_noticed(world: MigratingWorld) -> None:
    """Check the outcomes of all clients, and that nothing of them is left after their end."""
    assert len(world.replies) == world.asked, "each operator is answered once"
    for client in world.clients.values():
        assert not client.held
        for handle in sorted(client.unreleased):
            client.wait(handle)
        world.deliver()
        session = world.controller.sessions[client.number]
        assert client.retired == client.launched, "each launch ends once"
        assert set(client.outcomes) == set(client.waits), "each wait ends"
        for wait, handle in client.waits.items():
            status, taint, maybe = client.outcomes[wait], client.taint[handle], client.maybe[handle]
            is_lost = world.has_lost and status.code in (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED)
            if not is_lost and status.message not in world.exhausted:
                assert not (status.ok and taint), f"{handle} is there although it depends on {taint}"
                # An array that could not be made is on no device, so that its devices may be mapped to the same
                # physical device.
                refused = (bool(taint) or world.shares) and "share a physical one" in status.message
                assert status.ok or refused or status.message in taint | maybe, (
                    f"{status} is not one of {taint | maybe}"
                )
        for handle, spec in client.arrays.items():
            entry = session.directory.entries[handle]
            if entry.error is not None or entry.spilled is not None:
                continue
            hosts = {client.locations[device].host for device in spec.sharding.devices}
            holding = {host.number for host in world.hosts.values() if handle in host.stores.get(client.number, ())}
            assert holding == hosts, "each array is only on the hosts of its virtual devices"
        assert all(number > 0 for number in session.programs), "the controller has dropped its internal programs"
        for handle in sorted(client.unreleased):
            client.release(handle)
        world.deliver()
        assert (session.directory.entries, session.directory.nbytes) == ({}, 0)
        for host in world.hosts.values():
            assert not host.stores.get(client.number), "all memory is released"
            assert not host.spilled.get(client.number), "no array is still spilled"
    assert not any(world.controller.ledger.used.values())

    for client in list(world.clients.values()):
        world.close(client)
    for host in world.hosts.values():
        assert (host.plans, host.stores, host.runs) == ({}, {}, {})
        assert not any(host.spilled.values())
        assert not any(host.lines.values())
    assert world.controller.functions.users == {}
    assert world.controller.slices.sessions == {}
    controller = world.controller
    assert not controller.migrations.under_way
    assert not controller.suspensions.by_session
    assert not controller.functions.waiting
    assert not any(island.needs_recompile for island in controller.resources.islands.values())
