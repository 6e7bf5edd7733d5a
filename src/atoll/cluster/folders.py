"""Where what outlives a cluster is kept: compiled programs, usage, and sessions that are put aside on disk."""

from __future__ import annotations

import os
from pathlib import Path

OFF = "off"


def default_cache_directory(wanted: str = "") -> str:
    """Where compiled programs are kept: $ATOLL_CACHE_DIR ("off" keeps none), or `wanted`, or a folder of the user's."""
    chosen = os.environ.get("ATOLL_CACHE_DIR", "")
    if chosen == OFF:
        return ""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return chosen or wanted or str(base / "atoll" / "programs")


def usage_file(cluster: str) -> str:
    """Where the usage of the cluster of that name is kept: in $ATOLL_STATE_DIR ("off" keeps none), or a folder of the
    user's. "" where nothing is to be kept.
    """
    chosen = os.environ.get("ATOLL_STATE_DIR", "")
    if chosen == OFF:
        return ""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return str(Path(chosen or base / "atoll") / "usage" / f"{cluster}.sqlite")


def suspended_folder() -> str:
    """Where a host keeps the arrays of sessions that are put aside on disk, unless the cluster's settings say where: in
    $ATOLL_STATE_DIR, or a folder of the user's.
    """
    chosen = os.environ.get("ATOLL_STATE_DIR", "")
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return str(Path(chosen if chosen and chosen != OFF else base / "atoll") / "suspended")
