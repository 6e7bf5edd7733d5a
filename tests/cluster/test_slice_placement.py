"""Tests of the placement of virtual devices and slices: tables of choices, and properties of all choices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape, boxes, is_box
from atoll.cluster.slice_placement import IslandDevices, Slices
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.virtual_devices import DeviceInfo, SessionDevices, VirtualDevice
from atoll.errors import Code, StatusError


def island(number: int, mesh: Shape, *, closed: str = "", kind: str = "cpu", host: int | None = None) -> IslandDevices:
    locations = tuple(DeviceLocation(number, number if host is None else host, i) for i in range(math.prod(mesh)))
    return IslandDevices(number, mesh, locations, (kind,), closed)


def cluster(*meshes: Shape) -> list[IslandDevices]:
    return [island(i, mesh) for i, mesh in enumerate(meshes)]


def opened(slices: Slices, number: int, islands: list[IslandDevices]) -> SessionDevices:
    """Open a session with one virtual device per physical device."""
    locations = [location for each in islands for location in each.locations]
    info = DeviceInfo(0, "cpu", "cpu", ("device",), "device", (0, 0, 0), 0, 0, 0)
    virtual = tuple(VirtualDevice(i, location.island, location.host, info) for i, location in enumerate(locations))
    return slices.open(number, virtual, dict(enumerate(locations)))


class Table:
    """A cluster with sessions. `add` returns the virtual devices of a new slice, and their locations."""

    def __init__(self, *meshes: Shape, sessions: int = 1) -> None:
        self.slices = Slices()
        self.islands = cluster(*meshes)
        for number in range(1, sessions + 1):
            opened(self.slices, number, self.islands)

    def add(
        self, *shape: int, session: int = 1, **slice_request: int | str | tuple[int, ...]
    ) -> tuple[list[int], list[str]]:
        count = slice_request.pop("count", None)
        asked = SliceRequest(count or math.prod(shape), () if count else shape, **slice_request)
        choice = self.slices.choose(session, asked, self.islands, self.free_bytes)
        made = self.slices.add(session, choice)
        locations = self.slices.sessions[session].locations
        return list(made.devices), [f"{locations[d].island}.{locations[d].ordinal}" for d in made.devices]

    free_bytes: Callable[[DeviceLocation], int] = staticmethod(lambda location: 1 << 62)

    def refusal(self, *shape: int, session: int = 1, **slice_request: int | str | tuple[int, ...]) -> str:
        with pytest.raises(StatusError) as raised:
            self.add(*shape, session=session, **slice_request)
        assert raised.value.status.code == Code.RESOURCE_EXHAUSTED
        return raised.value.status.message


def test_a_slice_of_an_idle_cluster_is_the_first_devices_where_they_are():
    assert Table((4,)).add(2) == ([0, 1], ["0.0", "0.1"])


def test_the_next_slice_is_elsewhere_and_so_is_that_of_another_session():
    table = Table((4,), sessions=2)
    assert table.add(2) == ([0, 1], ["0.0", "0.1"])
    assert table.add(2, session=2) == ([2, 3], ["0.2", "0.3"])
    # All devices are in use, so that sharing starts at the lowest.
    assert table.add(2, session=2) == ([0, 1], ["0.0", "0.1"])


def test_sessions_are_spread_over_islands():
    table = Table((2,), (2,), sessions=3)
    assert [table.add(2, session=n)[1] for n in (1, 2, 3)] == [["0.0", "0.1"], ["1.0", "1.1"], ["0.0", "0.1"]]


def test_least_load_goes_before_identity():
    table = Table((4,), sessions=4)
    table.add(2)  # on 0 and 1
    for number in (2, 3, 4):
        table.slices.sessions[number].locations.update(
            {0: DeviceLocation(0, 0, 2), 1: DeviceLocation(0, 0, 3), 2: DeviceLocation(0, 0, 0)}
        )
        table.slices.add(number, table.slices.choose(number, SliceRequest(2), [island(0, (2,))]))
    # Devices 2 and 3 have fewer slices than 0 and 1, and the session has virtual devices there.
    assert table.add(2)[1] == ["0.2", "0.3"]


def test_virtual_devices_that_nothing_uses_go_where_least_load_is():
    table = Table((4,), sessions=3)
    table.add(2, session=2)
    table.slices.sessions[3].slices.clear()
    for _ in range(2):  # devices 2 and 3 get two slices of other sessions
        number = len(table.slices.sessions) + 1
        opened(table.slices, number, table.islands)
        table.slices.add(number, table.slices.choose(number, SliceRequest(2), [_tail(table.islands[0])]))
    table.add(2)
    # The session's devices 0 and 1 are taken. Its devices 2 and 3 are under two slices, as are 0 and 1, so they stay.
    assert table.add(2) == ([2, 3], ["0.2", "0.3"])
    opened(table.slices, 9, table.islands)
    table.slices.release(2, 1)
    assert table.add(2, session=9) == ([0, 1], ["0.0", "0.1"])
    # Devices 0 and 1 have fewer slices, so that the session's devices 2 and 3 move there.
    assert table.add(2, session=9)[0] == [2, 3]


def _tail(whole: IslandDevices) -> IslandDevices:
    return IslandDevices(whole.number, (2,), whole.locations[2:], whole.kinds)


def test_devices_on_which_something_was_made_stay_where_they_are():
    table = Table((4,), sessions=2)
    table.add(2, session=2)
    table.slices.sessions[1].used.update({0, 1})
    # Devices 2 and 3 have the fewest slices, and the session's own devices 2 and 3 are there.
    assert table.add(2) == ([2, 3], ["0.2", "0.3"])
    table.slices.sessions[1].used.update({2, 3})
    table.add(2, session=2)
    table.slices.release(2, 1)
    # Devices 0 and 1 now have fewer slices than 2 and 3, and the session's remaining virtual devices are there.
    assert table.add(2) == ([0, 1], ["0.0", "0.1"])


def test_a_shape_is_a_contiguous_mesh_in_its_own_order():
    table = Table((4, 4))
    assert table.add(2, 2)[1] == ["0.0", "0.1", "0.4", "0.5"]
    assert table.add(2, 2)[1] == ["0.2", "0.3", "0.6", "0.7"]
    assert table.add(1, 4)[1] == ["0.8", "0.9", "0.10", "0.11"]


def test_a_number_of_devices_is_the_most_compact_mesh_or_any_devices():
    assert Table((4, 4)).add(count=4)[1] == ["0.0", "0.1", "0.4", "0.5"]
    table = Table((2, 2))
    assert table.add(count=3)[1] == ["0.0", "0.1", "0.2"]
    table = Table((4,))
    table.slices.sessions[1].used.update(range(4))
    table.slices.add(1, table.slices.choose(1, SliceRequest(1), [_tail(table.islands[0])]))  # device 2
    # Device 2 is taken, and no devices can be exchanged.
    assert table.add(count=3) == ([0, 1, 3], ["0.0", "0.1", "0.3"])


def test_slices_on_the_same_island_and_on_others():
    table = Table((4,), (4,))
    table.add(2)
    assert table.add(2, same_island_as=(1,))[1] == ["0.2", "0.3"]
    assert table.add(2, other_island_than=(1,))[1] == ["1.0", "1.1"]
    assert "slice 1 is on it" in table.refusal(5, other_island_than=(1,))
    with pytest.raises(StatusError, match="slice 9 does not exist"):
        table.add(2, same_island_as=(9,))


def test_kinds_of_devices():
    table = Table((2,))
    table.islands.append(island(1, (2,), kind="cuda", host=1))
    opened(table.slices, 1, table.islands)
    assert table.add(2, kind="GPU")[1] == ["1.0", "1.1"]
    assert table.add(2, kind="cpu")[1] == ["0.0", "0.1"]
    assert "island 0 (2 cpu): it has no tpu devices" in Table((2,)).refusal(2, kind="tpu")


def test_memory_that_has_to_be_free():
    table = Table((2,), (2,))
    table.free_bytes = lambda location: 100 if location.island == 0 else 1000
    assert table.add(2, memory_per_device=500)[1] == ["1.0", "1.1"]
    text = table.refusal(1, memory_per_device=5000)
    assert "100 B" in text
    assert "1000 B" in text


def test_a_slice_that_needs_one_more_island_is_refused_for_good():
    table = Table((4,), (4,))
    table.add(2)
    table.add(2, other_island_than=(1,))
    with pytest.raises(
        StatusError, match=r"another island than slices 1, 2: this cluster has 2 islands\. Start it with more islands"
    ) as raised:
        table.add(2, other_island_than=(1, 2))
    assert raised.value.status.code == Code.FAILED_PRECONDITION


def test_a_refusal_names_what_is_free_and_why_each_island_will_not_do():
    table = Table((4,), (2, 2))
    table.islands[1] = island(1, (2, 2), closed="it is restarting")
    table.add(3)
    text = table.refusal(2, 2)
    assert "cannot place a 2x2 mesh of devices" in text
    assert "island 0 (4 cpu): it has no sub-mesh 2x2" in text
    assert "island 1 (2x2 cpu): it is restarting" in text
    assert "in no slice: island 0: 3; island 1: 4, 5, 6, 7. Try again when all islands are ready" in text
    assert "it has 4 devices" in table.refusal(count=5)


def test_a_refusal_names_the_next_step():
    table = Table((4,))
    assert table.refusal(count=5).endswith("Request a slice that one of the islands can have")
    table.add(4)
    for exclusive in (False, True):
        text = table.refusal(count=2, exclusive=exclusive)
        assert "too few devices of this session are unused" in text
        assert text.endswith("Release a slice of this session with slice.release(), or request fewer devices")


def test_a_refusal_of_exclusive_devices_names_other_sessions():
    table = Table((2,), sessions=2)
    table.add(2, session=2)
    text = table.refusal(count=2, exclusive=True)
    assert "island 0 (2 cpu): other sessions use its devices" in text
    assert text.endswith("Omit exclusive=True, or wait until the other sessions have ended")


def test_released_devices_can_be_had_again():
    table = Table((2,))
    table.add(2)
    assert "island 0: none" in table.refusal(1)
    table.slices.release(1, 1)
    assert table.add(2) == ([0, 1], ["0.0", "0.1"])
    with pytest.raises(StatusError, match="slice 1 does not exist"):
        table.slices.release(1, 1)


# ---- the target of a migration


def test_a_slice_moves_to_the_devices_that_are_named_or_to_the_emptiest():
    table = Table((4,), (4,), sessions=2)
    table.add(2)
    assert table.slices.target(1, 1, table.islands[1]) == {0: DeviceLocation(1, 1, 0), 1: DeviceLocation(1, 1, 1)}
    table.slices.add(2, table.slices.choose(2, SliceRequest(2), table.islands[1:]))
    assert table.slices.target(1, 1, table.islands[1]) == {0: DeviceLocation(1, 1, 2), 1: DeviceLocation(1, 1, 3)}
    wanted = (DeviceLocation(1, 1, 1), DeviceLocation(1, 1, 2))
    assert table.slices.target(1, 1, table.islands[1], wanted) == dict(enumerate(wanted))


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ((0,), "needs 2 devices"),
        ((0, 0), "each once"),
        ((0, 2), "do not form a 2 mesh"),
        ((3, 9), "each once"),
    ],
)
def test_devices_of_another_shape_are_refused(wanted: tuple[int, ...], text: str):
    table = Table((4,))
    table.add(2)
    with pytest.raises(StatusError, match=text):
        table.slices.target(1, 1, table.islands[0], tuple(DeviceLocation(0, 0, i) for i in wanted))


def test_an_island_that_is_closed_or_too_small_is_no_target():
    table = Table((4,))
    table.add(3)
    with pytest.raises(StatusError, match="it is lost"):
        table.slices.target(1, 1, island(1, (4,), closed="it is lost"))
    with pytest.raises(StatusError, match="no devices for a 3 mesh"):
        table.slices.target(1, 1, island(1, (2,)))


# ---- virtual devices that share a device


def test_arrays_over_two_virtual_devices_on_one_device_are_refused():
    table = Table((2,))
    devices = table.slices.sessions[1]
    devices.use("f", [(0, 1)])
    devices.relocate({1: DeviceLocation(0, 0, 0)})
    devices.use("f", [(0,), (1,)])
    with pytest.raises(StatusError, match=r"'f' lies on the virtual devices 0 and 1, which share a physical one"):
        devices.use("f", [(0, 1)])


# ---- properties

MESHES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


class Sessions(RuleBasedStateMachine):
    """Open and close sessions, add, use, release and migrate slices."""

    slices_made = Bundle("slices")

    @initialize(meshes=MESHES)
    def start(self, meshes: list[Shape]) -> None:
        self.slices = Slices()
        self.islands = cluster(*meshes)
        self.count = 0

    @rule()
    def open(self) -> None:
        self.count += 1
        opened(self.slices, self.count, self.islands)

    @precondition(lambda self: self.slices.sessions)
    @rule(target=slices_made, data=st.data())
    def add(self, data: st.DataObject) -> tuple[int, int]:
        session = data.draw(st.sampled_from(sorted(self.slices.sessions)))
        shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        meshed = data.draw(st.booleans())
        slice_request = SliceRequest(math.prod(shape), shape if meshed else ())
        devices = self.slices.sessions[session]
        before, load = dict(devices.locations), self.slices.load()
        free = devices.free()
        choice, refusal = None, ""
        try:
            choice = self.slices.choose(session, slice_request, self.islands)
        except StatusError as error:
            refusal = error.status.message
        if choice is None:
            assert devices.locations == before
            for number, ids in free.items():
                assert f"island {number}: {', '.join(map(str, ids)) or 'none'}" in refusal
            if not devices.used and meshed:  # then the reason was the topology or the number
                fits = any(list(boxes(each.mesh, shape)) for each in self.islands)
                assert not fits or max(map(len, free.values())) < slice_request.count
            return session, 0
        places = dict(zip(choice.devices, choice.locations, strict=True))
        assert all(before[d] == location for d, location in places.items() if d in devices.used)
        if not devices.used and meshed:
            least = min(
                sum(load[each.locations[i]] for i in box) for each in self.islands for box in boxes(each.mesh, shape)
            )
            assert sum(load[location] for location in choice.locations) == least
        made = self.slices.add(session, choice)
        assert len(set(made.devices)) == len(set(choice.locations)) == slice_request.count
        home = {device.id: device.island for device in devices.virtual}
        assert len({home[d] for d in made.devices}) == 1
        assert all(d in free[home[d]] for d in made.devices)
        assert all(devices.locations[d] == location for d, location in before.items() if d not in made.devices)
        return session, made.number

    @rule(which=consumes(slices_made))
    def release(self, which: tuple[int, int]) -> None:
        session, number = which
        devices = self.slices.sessions.get(session)
        if devices is None or number not in devices.slices:
            return
        taken = set(devices.slices[number].devices)
        free = {d for each in devices.free().values() for d in each}
        locations = dict(devices.locations)
        self.slices.release(session, number)
        assert {d for each in devices.free().values() for d in each} == free | taken
        assert devices.locations == locations

    @rule(which=slices_made, data=st.data())
    def move(self, which: tuple[int, int], data: st.DataObject) -> None:
        session, number = which
        devices = self.slices.sessions.get(session)
        if devices is None or number not in devices.slices:
            return
        to = data.draw(st.sampled_from(self.islands))
        try:
            changes = self.slices.target(session, number, to)
        except StatusError:
            return
        assert set(changes) == set(devices.slices[number].devices)
        devices.relocate(changes)

    @precondition(lambda self: self.slices.sessions)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.slices.sessions)))
        devices = self.slices.sessions[session]
        devices.use("x", [(data.draw(st.sampled_from(sorted(devices.locations))),)])

    @precondition(lambda self: self.slices.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.slices.close(data.draw(st.sampled_from(sorted(self.slices.sessions))))

    @invariant()
    def slices_are_what_they_say(self) -> None:
        if not hasattr(self, "slices"):
            return
        counted: Counter[DeviceLocation] = Counter()
        for devices in self.slices.sessions.values():
            members = [d for each in devices.slices.values() for d in each.devices]
            assert len(members) == len(set(members))
            for each in devices.slices.values():
                locations = [devices.locations[d] for d in each.devices]
                counted.update(locations)
                assert len(set(locations)) == len(locations)
                (number,) = {location.island for location in locations}
                where = self.islands[number]
                if each.meshed:
                    assert is_box([where.locations.index(location) for location in locations], where.mesh, each.shape)
        assert +self.slices.load() == counted


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=25)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.integers(1, 4))
def test_slices_of_one_shape_never_share_while_there_is_room(shape: Shape, copies: int):
    table = Table((copies * shape[0], *shape[1:]), sessions=copies)
    for number in range(1, copies + 1):
        table.add(*shape, session=number)
    assert sum(table.slices.load().values()) == copies * math.prod(shape)
