"""The platforms that workers can compute on. A wrong name is refused before any process is started."""

from __future__ import annotations

import importlib.metadata
import os

from atoll.cluster.settings import check_known
from atoll.devices.device_kinds import KINDS

# JAX's own, by the names that JAX_PLATFORMS takes ("gpu" stands for whichever kind of GPU there is), and Atoll's.
KNOWN_PLATFORMS = ("cpu", "cuda", "gpu", "oneapi", "rocm", "tpu", *KINDS)

# Plug-ins of JAX that provide a platform of the table above, or none that a worker can compute on.
_ORDINARY_PLUGINS = ("atoll", "xla_cuda", "xla_rocm")


def check_platform(text: str) -> None:
    """Raises SettingsError for a platform that nothing provides; `text` may name several, separated by commas.

    Any name passes where a plug-in for other hardware is installed: only the plug-in knows what its platform is called.
    """
    unknown = [name for name in text.split(",") if name not in KNOWN_PLATFORMS]
    if unknown and not _has_other_plugins():
        check_known("platform", unknown[0], KNOWN_PLATFORMS)


def _has_other_plugins() -> bool:
    names = [entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")]
    return bool(os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS")) or not all(
        name.startswith(_ORDINARY_PLUGINS) for name in names
    )
