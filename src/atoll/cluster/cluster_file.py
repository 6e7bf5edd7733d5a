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

A setting has the name of the flag of `atoll up`, with _ for -. Flags take precedence over the file, and the file over
the environment.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from atoll.cluster.former_names import present_keys
from atoll.cluster.mesh import parse_mesh
from atoll.cluster.settings import ClusterSettings, Dispatch, OnOff, SuspendLower, check_grants
from atoll.cluster.topology import IslandShape, Topology
from atoll.errors import SettingsError
from atoll.quantities import parse_bytes

FILE_VARIABLE = "ATOLL_CLUSTER"
MOST_ISLANDS = 1 << 16

_Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_ISLANDS)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


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
    platform: str | None = None
    topology: str | None = None
    device_memory: int | str | None = None
    dispatch: Dispatch | None = None
    policy: str | None = None
    engine: str | None = None
    lease: _Seconds | None = None
    wait: _Seconds | None = None
    bulk_tls: OnOff | None = None
    ray_address: str | None = None
    ray_resources: str | None = None
    ray_labels: str | None = None
    ray_strategy: str | None = None
    suspend_directory: str | None = None
    suspended: _Seconds | None = None
    suspend_lower: SuspendLower | None = None
    spill: int | str | None = None
    python_read: tuple[str, ...] | None = None
    python_write: tuple[str, ...] | None = None
    python_network: OnOff | None = None


# Names of `ClusterSettings` that differ from those of the file.
_SETTINGS = {"topology": "mesh", "lease": "lease_seconds", "wait": "wait_seconds", "suspended": "suspended_seconds"}
_PLACE = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>.*)`$", re.DOTALL)


def read_cluster_file(
    path: str | Path, settings: ClusterSettings, flags: Mapping[str, Any] | None = None
) -> ClusterSettings:
    """Return the settings, overridden by the file, and then by `flags`, which have the names of `ClusterSettings`.

    Raise a SettingsError that names the file and the key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    try:
        file = msgspec.convert(present_keys(content), _File)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {_explained(str(error))}") from None
    said = {
        _SETTINGS.get(name, name): value
        for name in _File.__struct_fields__
        if name != "island" and (value := getattr(file, name)) is not None
    }
    for name in ("device_memory", "spill"):
        if isinstance(said.get(name), str):
            said[name] = _bytes(said[name], f"{path}: {name}")
    for name in ("python_read", "python_write"):
        check_grants(f"{path}: {name}", said.get(name, ()))
    settings = msgspec.structs.replace(settings, **said | dict(flags or {}))
    shapes = [shape for number, each in enumerate(file.island) for shape in _shapes(each, settings, number, path)]
    if len(shapes) > MOST_ISLANDS:
        raise SettingsError(f"{path}: a cluster has at most {MOST_ISLANDS} islands, but the file has {len(shapes)}")
    return msgspec.structs.replace(settings, shapes=tuple(shapes), islands=str(Topology(tuple(shapes))))


def settings_from_environment(path: str | Path = "") -> ClusterSettings:
    """Return the settings of the environment, overridden by the cluster file at `path` or in $ATOLL_CLUSTER."""
    settings = ClusterSettings.from_environment()
    path = path or os.environ.get(FILE_VARIABLE, "")
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


def _bytes(text: str, where: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _explained(text: str) -> str:
    """Return msgspec's message with the key first."""
    found = _PLACE.match(text)
    what, where = (found["what"], found["where"]) if found else (text, "")
    if "unknown field" in what:
        names = _Island.__struct_fields__ if where else _File.__struct_fields__
        what += f"; the known ones are: {', '.join(names)}"
    return f"{where}: {what}" if where else what
