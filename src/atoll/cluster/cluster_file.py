"""A cluster in a file, in TOML: its settings, and islands that may differ in hosts, devices, platform and mesh.

    platform = "cuda"

    [[island]]
    count = 2
    hosts = 4
    devices = 8
    topology = "8x4"

    [[island]]
    devices = 4
    platform = "cpu"

What a flag of `atoll up` sets has the flag's name here, with _ for -. Flags count more than the file, and the file more
than the environment.
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
    """`count` islands that are alike. "" stands for what all islands of the file have."""

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


# Where the name of a setting is another one.
_SETTINGS = {"topology": "mesh", "lease": "lease_seconds", "wait": "wait_seconds", "suspended": "suspended_seconds"}
_PLACE = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>.*)`$", re.DOTALL)


def read_cluster_file(
    path: str | Path, settings: ClusterSettings, flags: Mapping[str, Any] | None = None
) -> ClusterSettings:
    """These settings with what the file says, and then with the `flags`, by the names of `ClusterSettings`.

    Raises SettingsError that names the file, and the key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} is no TOML: {error}") from None
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
        raise SettingsError(f"{path}: a cluster has at most {MOST_ISLANDS} islands, and these are {len(shapes)}")
    return msgspec.structs.replace(settings, shapes=tuple(shapes), islands=str(Topology(tuple(shapes))))


def settings_from_environment(path: str | Path = "") -> ClusterSettings:
    """The cluster of the environment, and of the file that it, or `path`, names. Raises SettingsError."""
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
    """msgspec's text, with the key first."""
    found = _PLACE.match(text)
    what, where = (found["what"], found["where"]) if found else (text, "")
    if "unknown field" in what:
        names = _Island.__struct_fields__ if where else _File.__struct_fields__
        what += f"; the known ones are: {', '.join(names)}"
    return f"{where}: {what}" if where else what
