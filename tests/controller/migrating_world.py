"""Random clients whose slices migrate, and their world."""

from __future__ import annotations

from typing import Any

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slice_requests import SliceRequest
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
                assert status.ok, status
        super().handle(message)

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
