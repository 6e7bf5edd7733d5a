"""Render messages of the controller as text, with the names that a transcript gives to numbers."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import Status
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import COPY_HANDLES, HOST_FEEDS, LOOP_HANDLES, SPILL_FEEDS

# Fields that are large, differ between runs, or do not matter in transcripts.
_HIDDEN = {
    "secret", "python", "platform_version", "platform", "lease", "launch_window", "payload", "info", "manifest",
    "directory", "content", "checksum", "share", "seconds", "payloads",
}  # fmt: skip
_KIND_OF_FIELD = {
    "arguments": "array",
    "results": "array",
    "handles": "array",
    "released": "array",
    "feeds": "feed",
    "feed": "feed",
    "session": "session",
    "function": "function",
    "subject": "function",
    "program": "program",
    "wait": "wait",
}
_LABELS = {"sequence": "gang", "run": "gang"}


class Names:
    """Names of numbers and numbers of names, per kind, such as array, feed or session."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._names: dict[tuple[str, int | str], str] = {}
        self._copies: dict[int, str] = {}

    def number(self, kind: str, name: str) -> int:
        """Return the number of a name. An unknown name gets a new number."""
        found = self._numbers.get((kind, name))
        if found is None:
            found = 1 + sum(1 for each, _ in self._numbers if each == kind)
            self.give(kind, found, name)
        return found

    def give(self, kind: str, number: int | str, name: str) -> None:
        """Give a number a name."""
        if isinstance(number, int):
            self._numbers[kind, name] = number
        self._names.setdefault((kind, number), name)

    def name(self, kind: str, number: int | str) -> str:
        """Return the name of a number."""
        if (kind, number) in self._names:
            return self._names[kind, number]
        if (isinstance(number, int) and number >= LOOP_HANDLES.start) or (kind == "feed" and number in HOST_FEEDS):
            return self._given(kind, int(number))
        if kind == "feed" and number in SPILL_FEEDS:
            return self._given(kind, int(number))
        return str(number)

    def _given(self, kind: str, number: int) -> str:
        """Return the name of a number that the controller has chosen."""
        if kind == "array":
            label = "copy" if number in COPY_HANDLES else "carried"
        else:
            label = "piece" if number in SPILL_FEEDS else "transfer"
        count = sum(1 for each in self._copies.values() if each.startswith(label))
        return self._copies.setdefault(number, f"{label}{count + 1}")

    def find_given(self, name: str) -> int | None:
        """Return the number that the controller has chosen for this name in the transcript."""
        return next((number for number, each in self._copies.items() if each == name), None)

    def in_text(self, text: str) -> str:
        """Replace the numbers of sessions and the cluster's names of functions in a text with the
        transcript's names.
        """
        for (kind, number), name in self._names.items():
            if kind == "function" and isinstance(number, str):
                text = text.replace(number, name)
        return re.sub(r"\bsession (\d+)\b", lambda found: f"session {self.name('session', int(found[1]))}", text)


def message_text(message: Any, names: Names) -> str:
    """Return the message as one line: its type, and all fields whose values are not the default."""
    special = _SPECIAL.get(type(message))
    if special is not None:
        return f"{type(message).__name__} {special(message, names)}".rstrip()
    return f"{type(message).__name__} {_fields(message, names)}".rstrip()


def _fields(message: Any, names: Names, *hidden: str) -> str:
    shown = []
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if field.name in _HIDDEN or field.name in hidden or value in (default, (), "", Status()):
            continue
        label = _LABELS.get(field.name, field.name)
        shown.append(f"{label}={_value(field.name, value, names)}" if value is not True else label)
    return " ".join(shown)


def _value(field: str, value: Any, names: Names) -> str:
    if isinstance(value, Status):
        return status_text(value, names)
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(_value(field, each, names) if not isinstance(each, tuple) else _pair(each) for each in value)
    if isinstance(value, str):
        value = names.name(_KIND_OF_FIELD[field], value) if field in _KIND_OF_FIELD else names.in_text(value)
        return f'"{value}"' if " " in value else value
    if isinstance(value, msgspec.Struct):
        return f"({_fields(value, names)})"
    return names.name(_KIND_OF_FIELD[field], value) if field in _KIND_OF_FIELD else str(value)


def _pair(values: tuple[Any, ...]) -> str:
    return ":".join(map(str, values)) if not any(isinstance(each, tuple) for each in values) else str(values)


def status_text(status: Status, names: Names) -> str:
    """Return a status in quotes, without the parts that differ between runs."""
    return "OK" if status.ok else f'"{names.in_text(str(status))}"'


# ---- messages whose fields are not readable


def _register_plan(message: m.RegisterPlan, names: Names) -> str:
    steps = [step_text(step, names) for segment in message.definition.segments for step in segment.steps]
    return f'plan={message.plan} of="{message.definition.name}" steps="{"; ".join(steps)}"'


def step_text(step: Any, names: Names) -> str:
    """Return the kind of a step, with the function that it calls."""
    kind = {p.Execute: "call", p.Python: "call Python"}.get(type(step)) or step.__struct_config__.tag
    return f"{kind} {names.name('function', step.function)}" if isinstance(step, p.Execute | p.Python) else str(kind)


def _welcome(message: m.Welcome, names: Names) -> str:
    devices = ",".join(str(each.id) for each in message.devices)
    hosts = ",".join(str(host) for host, _ in message.hosts)
    return f"session={names.name('session', message.session)} devices={devices} hosts={hosts}"


def _open_store(message: m.OpenStore, names: Names) -> str:
    return f"session={names.name('session', message.session)}"


def _compile(message: m.Compile, names: Names) -> str:
    devices = ",".join(_pair(each) for replica in message.assignment for each in replica)
    more = " recompile" if message.recompile else ""
    feed, session = names.name("feed", message.feed), names.name("session", message.session)
    return f"function={names.name('function', message.function)} source={feed} of={session} devices={devices}{more}"


def _spill_request(message: m.SpillRequest, names: Names) -> str:
    shards = ",".join(f"{number}:{names.name('array', handle)}" for number, handle, _ in message.shards)
    to = " to_files" if message.to_files else ""
    return f"session={names.name('session', message.session)} request={message.request} pieces={shards}{to}"


def _send_spilled(message: m.SendSpilled, names: Names) -> str:
    pieces = [
        f"{piece.number} as {names.name('feed', feed)} to host {','.join(map(str, hosts))}"
        for piece, feed, hosts in message.pieces
    ]
    return f'session={names.name("session", message.session)} pieces="{"; ".join(pieces)}"'


def _drop_spilled(message: m.DropSpilled, names: Names) -> str:
    pieces = ",".join(str(each.number) for each in message.pieces)
    return f"session={names.name('session', message.session)} pieces={pieces}"


def _fail_feeds(message: m.FailFeeds, names: Names) -> str:
    feeds = ",".join(names.name("feed", first + i) for first, count in message.feeds for i in range(count))
    return f"session={names.name('session', message.session)} feeds={feeds} status={status_text(message.status, names)}"


def _run(message: m.Run, names: Names) -> str:
    text = _fields(message, names, "host_feeds", "sampled")
    return f"{text} transfers={names.name('feed', message.host_feeds)}" if message.host_feeds else text


def _free_many(message: m.FreeMany, names: Names) -> str:
    return "; ".join(_fields(each, names) for each in message.frees)


def _sources(message: m.SendSources, names: Names) -> str:
    functions = (
        f"{names.name('function', function)} to host {','.join(map(str, hosts))}"
        for function, hosts in message.functions
    )
    return f'functions="{"; ".join(functions)}"'


def _hosts_restarted(message: m.HostsRestarted, names: Names) -> str:
    return f"hosts={','.join(str(host) for host, _ in message.hosts)}"


_SPECIAL: dict[type[Any], Callable[[Any, Names], str]] = {
    m.RegisterPlan: _register_plan,
    m.Welcome: _welcome,
    m.OpenStore: _open_store,
    m.Compile: _compile,
    m.SpillRequest: _spill_request,
    m.SendSpilled: _send_spilled,
    m.DropSpilled: _drop_spilled,
    m.FailFeeds: _fail_feeds,
    m.Run: _run,
    m.FreeMany: _free_many,
    m.SendSources: _sources,
    m.HostsRestarted: _hosts_restarted,
}


def without_versions(text: str) -> str:
    """Return a text without Atoll's version, which would change the transcripts at each release."""
    return re.sub(r"Atoll \d+\.\d+\S*", "Atoll VERSION", text)
