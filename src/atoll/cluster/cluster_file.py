"""Read a cluster file in TOML, with settings and islands that may differ in hosts, devices, platform and mesh.

    platform = "cuda"

    [[island]]
    count = 2
    hosts = 4
    devices = 8
    topology = "8x4"

    [[island]]
    devices = 4
    platform = "cpu"

A setting has the name of its option, with _ for -. Options take precedence over the file, and the file over the
environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from atoll.cluster.environment_variables import CLUSTER_FILE
from atoll.cluster.former_names import present_keys
from atoll.cluster.mesh import parse_mesh
from atoll.cluster.settings import SETTINGS, ClusterSettings
from atoll.cluster.topology import MAX_PER_LEVEL, IslandShape, make_topology
from atoll.cluster.validation_errors import split_place
from atoll.decodable import decodable
from atoll.errors import SettingsError

_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_PER_LEVEL)]


class _Island(msgspec.Struct, forbid_unknown_fields=True):
    """`count` identical islands. "" stands for the value of the whole file."""

    devices: _Count
    hosts: _Count = 1
    count: _Count = 1
    platform: str = ""
    topology: str = ""
    kind: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    island: Annotated[list[_Island], msgspec.Meta(min_length=1)]


_KEYS = {setting.key: name for name, setting in SETTINGS.items() if setting.key}


def read_cluster_file(
    path: str | Path, settings: ClusterSettings, flags: Mapping[str, Any] | None = None
) -> ClusterSettings:
    """Return the settings, overridden by the file, and then by `flags`, which have the names of `ClusterSettings`.

    Raise a SettingsError that names the file and the key.
    """
    import tomllib  # most processes read no such file

    try:
        content = present_keys(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    given = {_KEYS[key]: content.pop(key) for key in list(content) if key in _KEYS}
    try:
        file = msgspec.convert(content, decodable(_File))
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {_explained(str(error))}") from None
    given = {name: SETTINGS[name].from_key(value, f"{path}: {SETTINGS[name].key}") for name, value in given.items()}
    settings = msgspec.structs.replace(settings, **given | dict(flags or {}))
    shapes = [shape for number, each in enumerate(file.island) for shape in _shapes(each, settings, number, path)]
    try:
        topology = make_topology(shapes)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    return msgspec.structs.replace(settings, shapes=topology.shapes, islands=str(topology))


def settings_from_environment() -> ClusterSettings:
    """Return the settings of the environment, overridden by the cluster file in $ATOLL_CLUSTER."""
    settings = ClusterSettings.from_environment()
    path = CLUSTER_FILE.text()
    return read_cluster_file(path, settings) if path else settings


def _shapes(island: _Island, settings: ClusterSettings, number: int, path: str | Path) -> Iterator[IslandShape]:
    where = f"{path}: island[{number}]"
    try:
        mesh = parse_mesh(island.topology or settings.mesh)
        shape = IslandShape(island.hosts, island.devices, island.platform or settings.platform, mesh, island.kind)
        shape.check()
    except ValueError as error:
        raise SettingsError(f"{where}.topology: {error}") from None
    for _ in range(island.count):
        yield shape


def _explained(text: str) -> str:
    """Return msgspec's message with the key first."""
    what, where = split_place(text)
    if "unknown field" in what:
        names = _Island.__struct_fields__ if where else ("island", *_KEYS)
        what += f"; the known ones are: {', '.join(names)}"
    return f"{where}: {what}" if where else what
