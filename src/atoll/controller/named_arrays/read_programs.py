"""Programs that read published arrays: each transfers some arrays of a source to the devices of a reader.

Scripts usually read many versions of the same types, so each session keeps the programs that it used last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.errors import invalid
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec
from atoll.ir.validation import DefinitionCheck
from atoll.migration.internal_programs import InternalPrograms
from atoll.named_arrays.version_records import PublishedArray
from atoll.state.session import Session

# Programs that a session keeps to read further versions of the same types.
MAX_READ_PROGRAMS = 128


class ReadProgram(msgspec.Struct, frozen=True):
    """A program of a session that reads arrays of these types, at these places. `number` is internal."""

    sources: tuple[ArraySpec, ...]
    targets: tuple[ArraySpec, ...]
    places: tuple[tuple[int, DeviceLocation], ...]
    number: int


def find_program(
    kept: list[ReadProgram],
    internal: InternalPrograms,
    session: Session,
    sources: tuple[ArraySpec, ...],
    source_places: Placement,
    targets: tuple[ArraySpec, ...],
) -> int:
    """Return the number of the program that reads arrays of these types. Raise StatusError if that is impossible.

    `kept` has the programs of the session, and gets the program. The last used one is at the end.
    """
    places = (*_places(source_places, sources), *_places(session.devices.locations, targets))
    for position, each in enumerate(kept):
        if each.places == places and each.sources == sources and each.targets == targets:
            kept.append(kept.pop(position))
            return each.number
    count = len(sources)
    node = ir.Transfer(tuple(range(count)), targets, reshard=True)
    definition = ir.Program("subscribe", sources, (node,), tuple(range(count, 2 * count)))
    check = DefinitionCheck(definition.name, 0, dict(places))
    check.arguments(sources)
    check.node(node)
    session.devices.use(definition.name, [each.sharding.devices for each in targets])
    number = internal.make(session, definition, dict(places))
    kept.append(ReadProgram(sources, targets, places, number))
    if len(kept) > MAX_READ_PROGRAMS:
        internal.drop(session, kept.pop(0).number)
    return number


def _places(
    locations: Mapping[int, DeviceLocation], specs: Iterable[ArraySpec]
) -> tuple[tuple[int, DeviceLocation], ...]:
    """Return the devices of these types with their locations, ordered by their numbers."""
    devices = sorted({device for each in specs for device in each.sharding.devices})
    return tuple([(device, locations[device]) for device in devices])


def type_of_result(session: Session, array: PublishedArray, target: ArraySpec) -> ArraySpec:
    """Return the type of the array that a session gets if it reads `array` as `target`.

    Raise INVALID_ARGUMENT if its dtype or shape is another one, or if a device is not one of the session.
    """
    source = array.spec
    for device in target.sharding.devices:
        if device not in session.devices.locations:
            raise invalid(f"device {device} does not exist in this session")
    if not target.sharding.devices:
        raise invalid("a published array is read to one or more devices")
    if (target.dtype, target.shape) != (source.dtype, source.shape):
        raise invalid(
            f"a published array of {source.dtype}{list(source.shape)} cannot be read as "
            f"{target.dtype}{list(target.shape)}"
        )
    return replace(source, sharding=target.sharding)
