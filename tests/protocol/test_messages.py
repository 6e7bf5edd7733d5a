from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.named_runs import NamedRun
from atoll.cluster.sandbox.grants import PythonRules
from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.topology import IslandShape, RankSlot
from atoll.cluster.usage.usage_records import By
from atoll.errors import Status
from atoll.ir import plan as p
from atoll.ir.program import Call, Program
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.protocol.messages.engine_messages import FromAgent, OfController, ToAgent
from atoll.protocol.messages.standby_messages import ToStandby

UNIONS = {
    "ToController": m.ToController,
    "ToWorker": m.ToWorker,
    "ToProcessRelay": m.ToProcessRelay,
    "ToProxy": m.ToProxy,
    "ToEngine": m.ToEngine,
    "ToOperator": m.ToOperator,
    "FromAgent": FromAgent,
    "ToAgent": ToAgent,
    "InGroup": m.InGroup,
    "OfController": OfController,
    "ToStandby": ToStandby,
}
MESSAGES = [
    value
    for value in vars(m).values()
    if isinstance(value, type) and issubclass(value, m.Message) and value is not m.Message
]

STATUS = Status(3, "wrong shape", {"key": b"\x00\xff"})
SPEC = ArraySpec("float32", (4,), Sharding((0, 1), Tiled((2,), (1, 0)), "device"), (0,))
LOCAL = p.LocalArray("float32", (4,), ((2,),), (0,), (1,))
SAMPLES: dict[Any, Any] = {
    int: 1 << 50,
    str: "text ä",
    bytes: b"\x00\xff",
    float: 0.5,
    bool: True,
    int | None: 0,
    bool | None: True,
    float | None: 0.5,
    str | None: "operator",
    bytes | None: b"\x00\xff",
    tuple[str, ...] | None: ("policy*",),
    dict[str, int]: {"cpu": 4},
    dict[int, bool] | None: {7: False, 1 << 62: True},
    RankSlot: RankSlot(1, 0),
    m.GangsEnded | None: m.GangsEnded(5, 1, 2, 7, (0, 1), ((3, 4),)),
    m.StoreContent: m.StoreContent(1, (2, 3), True),
    m.QueryKind: m.QueryKind.COST,
    m.CompileReport: m.CompileReport("a0b1", m.CompileStage.COMPILING, 812),
    By: By.SESSION,
    IslandShape | None: IslandShape(2, 4, "cuda", (2, 4), "h100"),
    Status: STATUS,
    Program: Program("f", (SPEC,), (Call(1, (0,), (SPEC,), (0, 1)),), (1,)),
    p.Plan: p.Plan(
        "f",
        (0,),
        (p.Segment(0, (p.Put(1, LOCAL, (p.HostPiece(0, 0, (2,), (-4,), ((0, 2),)),)),), (1,), (), (0,)),),
        (1,),
    ),
    m.MachineReport: m.MachineReport("m0", "10.0.0.1", "free", "", {"cpu": 4}, 1 << 30),
    SliceRequest: SliceRequest(4, (2, 2), "cpu", (1,), (2, 3), 1 << 30),
    m.SpilledPiece: m.SpilledPiece(7, 1 << 30, "/state/7.piece", 1 << 31, 1 << 40),
    PythonRules: PythonRules(read=("/data",), write=("/checkpoints",)),
    Mechanisms | None: Mechanisms(Namespaces.BY_ROOT, True, True, 3, {"landlock": "too old"}),
    m.DeviceInfo: m.DeviceInfo(0, "cpu", "cpu", ("device",), "device", (0, 0, 0), 0, 0, 0, (("core_count", 8),)),
}
SAMPLES[m.GroupEnds] = m.GroupEnds(7, (0, 1), (1, 2, 3, 4))
SAMPLES[m.RelayedPong] = m.RelayedPong(1, 7.5, 1 << 40, (2, 3), 1000)
SAMPLES[m.Pong | None] = m.Pong(7.5, 1 << 40, (2,))
SAMPLES[m.Free] = m.Free(1, (2, 3), True)
SAMPLES[ArraySpec] = SPEC
SAMPLES[ClusterSettings] = ClusterSettings("2x2x4", "cuda", lease_seconds=4.0)
SAMPLES[m.KnownIsland] = m.KnownIsland(1, IslandShape(2, 4, "cuda"), IslandState.DRAINED, 7, ("m1", "m2"), True)
SAMPLES[NamedRun] = NamedRun("run-7", 600.0, 5.0)
SAMPLES[m.VersionArray] = m.VersionArray("['w'][0]", "float32", (4,))
SAMPLES[m.VirtualDevice] = m.VirtualDevice(0, 0, 0, SAMPLES[m.DeviceInfo])


def sample(kind: Any) -> Any:
    """Return a value of a field's type."""
    if kind in SAMPLES:
        return SAMPLES[kind]
    assert typing.get_origin(kind) is tuple, f"no sample of {kind}"
    arguments = typing.get_args(kind)
    if arguments[-1] is Ellipsis:
        return (sample(arguments[0]),) * 2
    return tuple(sample(each) for each in arguments)


def sample_message(kind: type[Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: sample(hints[field.name]) for field in msgspec.structs.fields(kind)})


def members(union: Any) -> tuple[type[Any], ...]:
    assert isinstance(union, types.UnionType)
    return typing.get_args(union)


@pytest.mark.parametrize(("union", "kind"), [(name, kind) for name, union in UNIONS.items() for kind in members(union)])
def test_every_message_survives_its_connection(union, kind):
    message = sample_message(kind)
    encoded = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(encoded, type=UNIONS[union]) == message


def test_tags_are_unique_over_all_messages():
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags), f"two messages have the same tag; the next free one is {max(tags) + 1}"
    assert all(isinstance(tag, int) for tag in tags)


def test_every_message_has_a_receiver():
    received = {kind for union in UNIONS.values() for kind in members(union)}
    assert set(MESSAGES) == received, "a message is in no union of a receiver, such as ToProxy"


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_do_not_change(kind):
    config = kind.__struct_config__
    assert (config.frozen, config.array_like) == (True, True)
    message = sample_message(kind)
    for field in kind.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(message, field, None)


def test_a_message_of_a_later_version_with_more_fields_is_still_read():
    encoded = msgspec.msgpack.encode([41, 7, "a field that we do not know"])
    assert msgspec.msgpack.decode(encoded, type=m.ToController) == m.ReleaseFunction(7)
