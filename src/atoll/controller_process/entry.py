"""Clean messages that enter the controller, before they become events that the core and its journal keep.

Tokens become digests, names become short and printable, and other texts become printable. All other messages are
unchanged, including all messages of a launch.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

from msgspec.structs import fields, replace

from atoll.cluster.printable import printable_name, printable_text
from atoll.errors import Status
from atoll.protocol import messages as m
from atoll.security.tokens import digest

_Clean = Callable[[Any], Any]

# The fields that are names. All other texts keep their lines.
_NAMES: dict[type[Any], tuple[str, ...]] = {
    m.Hello: ("role", "version", "label", "platform"),
    m.WorkerReady: ("platform",),
    m.Compiled: ("name",),
    m.SetTenant: ("name",),
    m.RemoveTenant: ("name",),
}


def _status(status: Status) -> Status:
    text = printable_text(status.message)
    return status if text == status.message else replace(status, message=text)


def _names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(printable_name, names))


def _program(definition: Any) -> Any:
    name = printable_name(definition.name)
    return definition if name == definition.name else replace(definition, name=name)


def _printable(value: Any) -> Any:
    """Return the value with all texts in it converted like names, including those in tuples."""
    if isinstance(value, tuple):
        return tuple(map(_printable, value))
    return printable_name(value) if isinstance(value, str) else value


@functools.cache
def _names_of_fields(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a struct's fields. Cached, since this takes 0.1 ms."""
    return tuple(field.name for field in fields(kind))


def _structs(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the structs with all their texts converted like names."""
    return tuple(
        replace(each, **{name: _printable(getattr(each, name)) for name in _names_of_fields(each.__class__)})
        for each in values
    )


def _waits(waits: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
    return tuple((number, printable_text(text)) for number, text in waits)


# Fields that contain texts, and fields that stop being texts.
_OTHERS: dict[type[Any], dict[str, _Clean]] = {
    m.Hello: {"token": digest},
    m.RegisterProgram: {"definition": _program},
    m.WorkerReady: {"devices": _structs},
    m.IslandStarts: {"machines": _names},
    m.EngineReport: {"machines": _structs, "waits": _waits},
}


def _cleaning(kind: type[Any]) -> dict[str, _Clean]:
    """Return the conversions of a kind of message, by field."""
    found: dict[str, _Clean] = {}
    for field in fields(kind):
        if field.type is str:
            found[field.name] = printable_name if field.name in _NAMES.get(kind, ()) else printable_text
        elif field.type is Status:
            found[field.name] = _status
    return found | _OTHERS.get(kind, {})


# By the kind of message, for kinds that `clean` changes.
CLEANED: dict[type[Any], dict[str, _Clean]] = {
    kind: cleaning for kind in typing.get_args(m.ToController) if (cleaning := _cleaning(kind))
}


def clean(message: Any) -> Any:
    """Return the message in the form that the controller keeps. Its kind must be in `CLEANED`."""
    changed = {}
    for name, make in CLEANED[message.__class__].items():
        value = getattr(message, name)
        made = make(value)
        if made != value:
            changed[name] = made
    return replace(message, **changed) if changed else message
