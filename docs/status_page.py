"""Writes reference/status.md from the types of a cluster's report and of other JSON: `python -m docs.status_page`."""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from atoll.cluster.cluster_runs import RunRecord
from atoll.controller_process.standby_status import StandbyStatus
from atoll.operate.top import WatchReport
from atoll.operate.why import Explanation
from atoll.protocol.messages import CheckReply
from atoll.telemetry.snapshot import Snapshot
from docs.headings import anchor_of

PAGE = Path(__file__).resolve().parent / "reference" / "status.md"
_HEAD = """\
# Status report

<!-- Written by `python -m docs.status_page` from `telemetry/snapshot.py`. -->

`atoll status --json` prints one JSON object. It has the following two fields, and the fields of
[the cluster](#the-cluster). Types such as *object* lead to the section with the fields of this object.

| field | type | meaning |
|---|---|---|
| `name` | string | name of the cluster (`atoll up --name`); empty if the command does not know it |
| `address` | string | address at which the command reached the controller |

A field may be absent if the controller runs another version of Atoll. Later versions can add fields. Sizes are in
bytes, and times in seconds of the controller's clock: the field `seconds` of the cluster is the present time of this
clock.

For example, this command prints the islands that are not ready:

```sh
atoll status --json | jq -r '.islands[] | select(.state != "ready") | "island \\(.id): \\(.state)"'
```

On the machine of a [standby](../operate/high-availability.md), the object has only `name`, `address` and
[`standby`](#standby).

Other commands also print JSON: [`atoll check`](#atoll-check---json), [`atoll why`](#atoll-why---json),
[`atoll top`](#atoll-top---json) and [`atoll logs`](#atoll-logs---json).
"""
_CHECK = """\
The object has `name` and `address`, as that of `atoll status`, and the following fields. The exit status is 1 if
there are contradictions or differences, which are bugs in Atoll.
"""
_WHY = """\
The object has `name` and `address`, as that of `atoll status`, and the following fields.
"""
_TOP = """\
The object has the fields of `atoll status --json`, and the following ones. `atoll top --json` prints one object and
exits, after one second. `atoll top --json --follow` prints one object per second, each in one line, until Ctrl-C.
"""
_LOGS = """\
Each line is an object for one record of the log. Records of some events have more fields, such as `event`, `session`
and `tenant`, if the cluster was started with `ATOLL_LOG_FORMAT=json`. Lines that are not Atoll's, for example of a
library, belong to the message of the record before. If they are the first ones, they are an object with only `message`.

| field | type | meaning |
|---|---|---|
| `time` | string | time in UTC, such as `2026-11-26T20:05:55.123Z` |
| `level` | string | `debug`, `info`, `warning`, `error` or `critical` |
| `process` | string | kind of the process, such as `controller` |
| `pid` | integer | process ID |
| `logger` | string | module that wrote the record |
| `message` | string | the message |
| `exception` | string | traceback, only with `ATOLL_LOG_FORMAT=json` |

For example, this command prints the messages of the last hour that are warnings or errors:

```sh
atoll logs --since 1h --json | jq -r 'select(.level == "warning" or .level == "error") | .message'
```
"""
_RUNS = """\
Each line is an object for one run of the cluster, the latest first. It has `run`, the number for `atoll logs --run`,
and `log`, the path of the log, and the following fields.
"""
_CLUSTER, _STANDBY = "The cluster", "standby"
_OTHER_COMMANDS: dict[str, type[msgspec.Struct]] = {
    "atoll check --json": CheckReply,
    "atoll why --json": Explanation,
    "atoll top --json": WatchReport,
    "atoll logs --runs --json": RunRecord,
}
_INTRODUCTIONS = {
    "atoll check --json": _CHECK,
    "atoll why --json": _WHY,
    "atoll top --json": _TOP,
    "atoll logs --runs --json": _RUNS,
}
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def meanings(struct: type) -> dict[str, str]:
    """Return the comments of the fields in the source of a class and its bases, by field."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if not issubclass(each, msgspec.Struct) or each is msgspec.Struct:
            continue
        fields = re.findall(r"^    (\w+): [^#\n]*(?:  # (.*))?$", inspect.getsource(each), re.MULTILINE)
        found |= {field: meaning for field, meaning in fields if meaning}
    return found


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in a type, without those in their fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in typing.get_args(kind):
        yield from structs_in(each)


def sections() -> dict[type[msgspec.Struct], str]:
    """Return the structs of the report, each with the title of its section: the path of the first field that has it."""
    found: dict[type[msgspec.Struct], str] = {}

    def add(struct: type[msgspec.Struct], title: str, path: str) -> None:
        if struct in found:
            return
        found[struct] = title
        for field, kind in typing.get_type_hints(struct).items():
            for inner in structs_in(kind):
                whole = f"{path}.{field}" if path else field
                add(inner, whole, whole)

    add(Snapshot, _CLUSTER, "")
    add(StandbyStatus, _STANDBY, _STANDBY)
    for command, struct in _OTHER_COMMANDS.items():
        add(struct, command, "")
    return found


def _type_text(kind: Any, titles: dict[type[msgspec.Struct], str]) -> str:
    """Return a type in the words of JSON."""
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        first, *_ = [each for each in arguments if each is not type(None)]
        return f"{_type_text(first, titles)} or null"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"array of {_type_text(arguments[0], titles)}"
        return f"array ({', '.join(_type_text(each, titles) for each in arguments)})"
    if origin is dict:
        return f"object, each value: {_type_text(arguments[1], titles)}"
    if issubclass(kind, msgspec.Struct):
        return f"[object](#{anchor_of(titles[kind])})"
    if issubclass(kind, enum.StrEnum):
        return ", ".join(f"`{each.value}`" for each in kind)
    return _NAMES[kind]


def page() -> str:
    """Return the page."""
    titles = sections()
    text = _HEAD
    for struct, title in titles.items():
        if struct is RunRecord:
            text += f"\n## `atoll logs --json`\n\n{_LOGS}"
        description = _INTRODUCTIONS.get(title, _description(struct)).strip()
        text += f"\n## {title if title == _CLUSTER else f'`{title}`'}\n\n{description}\n\n"
        text += "| field | type | meaning |\n|---|---|---|\n"
        known, kinds = meanings(struct), typing.get_type_hints(struct)
        for field in msgspec.structs.fields(struct):
            meaning = known.get(field.name) or _summary(kinds[field.name])
            text += f"| `{field.name}` | {_type_text(kinds[field.name], titles)} | {meaning} |\n"
    return text


def _summary(kind: Any) -> str:
    """Return the first sentence about the objects in a field; "" if it has none."""
    text = next((_description(each).partition(". ")[0].rstrip(".") for each in structs_in(kind)), "")
    return text[:1].lower() + text[1:]


def _description(struct: type) -> str:
    return " ".join((inspect.getdoc(struct) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page())
