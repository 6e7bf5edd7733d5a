"""The files of the control groups that this process is in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def group_files(root: Path, names: Mapping[str, str]) -> list[list[Path]]:
    """Return the paths of files in this process's control groups: a list for each hierarchy that has a name.

    `names` are by controller; "" is the hierarchy of version 2. Each list begins with the process's own group, followed
    by the groups that contain it. The files need not exist. `root` is the directory with `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        for controller in names.keys() & set(controllers.split(",")):
            group = root / "sys/fs/cgroup" / controller / path.lstrip("/")
            groups = (group, *list(group.parents)[: path.count("/")])
            found.append([each / names[controller] for each in groups])
    return found
