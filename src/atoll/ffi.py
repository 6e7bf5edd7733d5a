"""FFI kernels whose libraries Atoll cannot find by itself.

Usually none of this is necessary: Atoll finds the library of a handler that was registered with
`jax.ffi.register_ffi_target`. `register` names the library explicitly, for example if the script's process cannot load
the library of the hosts, because it runs on another system::

    atoll.ffi.register("/kernels/linux/librms_norm.so", {"rms_norm": "RmsNorm"})
    jax.ffi.ffi_call("rms_norm", ...)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from atoll.client.ffi_handlers import HANDLERS, PLATFORMS, HandlerRegistration, read_library
from atoll.errors import invalid
from atoll.protocol.messages import LibraryStage, LibraryType

__all__ = ["register"]

_STAGES: tuple[LibraryStage, ...] = ("instantiate", "prepare", "initialize", "execute")


def register(
    library: str | os.PathLike[str],
    targets: Mapping[str, str | Mapping[str, str]],
    *,
    types: Mapping[str, str | tuple[str, str]] | None = None,
    platform: str = "cpu",
) -> None:
    """Register FFI targets with the hosts of Atoll's clusters. This process does not load the library.

    The registration applies to programs that are compiled afterwards, and takes precedence over
    `jax.ffi.register_ffi_target`. A second call for the same target replaces the first. Devices of this process do not
    know the targets.

    Args:
        library: The file of a shared library for the hosts. It is read immediately, and sent to hosts that need it.
        targets: By the name of each target, the symbol of its handler, or symbols by stage ("instantiate", "prepare",
            "initialize", "execute").
        types: Types of the states that handlers keep. By the name of each type, the symbol of its `XLA_FFI_TypeId`, or
            the symbols of that and of its `XLA_FFI_TypeInfo`.
        platform: The platform of the devices: "cpu", "cuda" or "rocm".

    Raises:
        StatusError: The file cannot be read or is too large, or a platform or stage does not exist.
    """
    if platform not in PLATFORMS:
        raise invalid(f"the platform of FFI targets is one of {', '.join(PLATFORMS)}, not {platform!r}")
    read = read_library(library)
    pairs = {name: (each, None) if isinstance(each, str) else each for name, each in (types or {}).items()}
    known = tuple(LibraryType(name, *symbols) for name, symbols in pairs.items())
    HANDLERS.give(
        platform,
        {name: HandlerRegistration(read, _handlers(name, symbols), known) for name, symbols in targets.items()},
    )


def _handlers(name: str, symbols: str | Mapping[str, str]) -> tuple[tuple[LibraryStage, str], ...]:
    """Return the symbols of a target by stage. Raise INVALID_ARGUMENT for an unknown stage."""
    if isinstance(symbols, str):
        return (("execute", symbols),)
    unknown = symbols.keys() - set(_STAGES)
    if unknown or not symbols:
        raise invalid(f"the FFI target {name!r} has handlers for {sorted(unknown)}, not for {', '.join(_STAGES)}")
    return tuple((stage, symbols[stage]) for stage in _STAGES if stage in symbols)
