"""The engines that there are: the name that `--engine` and ATOLL_ENGINE take, and the class behind it."""

from __future__ import annotations

from pkgutil import resolve_name

from atoll.cluster.settings import check_known
from atoll.engines.engine_interface import Engine
from atoll.engines.engine_options import EngineOptions

ENGINES = {
    "local": "atoll.engines.local:LocalEngine",
    "hosts": "atoll.engines.hosts.hosts_engine:HostsEngine",
    "ray": "atoll.engines.ray.ray_engine:RayEngine",
}


def check_engine(name: str) -> None:
    """Raises SettingsError for a name that no engine has."""
    check_known("engine", name, ENGINES)


def make_engine(options: EngineOptions) -> Engine:
    """The engine that the settings choose. Raises SettingsError, and ClusterError where it cannot serve the cluster."""
    check_engine(options.settings.engine)
    engine: Engine = resolve_name(ENGINES[options.settings.engine])(options)
    return engine
